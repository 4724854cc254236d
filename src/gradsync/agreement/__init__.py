"""Agreement: at the door before the first byte, and in a small header with every synchronization."""
