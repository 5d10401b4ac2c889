"""Files that users and other tools write, read so that nothing in them and nothing done to them can hurt a server."""
