"""The paces: how often ranks average, and what, gradients or parameters."""
