"""Whether the replicas are still alike, and what is done when they are not."""
