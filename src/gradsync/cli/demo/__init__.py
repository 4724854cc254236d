"""`gradsync demo`."""
