"""What the links and this machine can do, measured: a `Cluster` to plan by."""
