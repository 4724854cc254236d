"""The comparison of replicas, and what is done when they are no longer alike."""
