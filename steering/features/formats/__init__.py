"""Formats of published SAEs and transcoders, one module for each family."""
