"""What `gs.auto()` does: profile a few steps, probe the links, choose a plan, and look after its prediction."""
