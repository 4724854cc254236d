"""One bucket's round trip: here exactly, as it is."""
