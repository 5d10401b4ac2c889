"""Coefficients of contents that controllers turn on: columns for them, and what each running request has."""
