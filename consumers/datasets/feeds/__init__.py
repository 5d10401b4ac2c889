"""Rows in the forms that trainers take, each in a module of its own that imports its package when it is called."""
