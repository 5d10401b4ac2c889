"""The index of a root: which files there are, which requests in them, and where each one's rows lie."""
