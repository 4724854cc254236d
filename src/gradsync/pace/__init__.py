"""How often ranks average, and what: gradients or parameters."""
