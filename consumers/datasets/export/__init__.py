"""Rows in files of other tools."""
