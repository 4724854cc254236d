"""The state of a run: collected, written as flat tensors, and handed out again to any number of ranks."""
