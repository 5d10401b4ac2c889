"""Functions of rows that consumers have computed where the rows are."""
