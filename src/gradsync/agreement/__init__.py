"""Ranks agree: on documents before the first byte, and by a small header with every synchronization."""
