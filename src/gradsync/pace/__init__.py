"""How often gradients travel."""
