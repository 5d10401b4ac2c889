"""The demo of the README: `make demo`."""
