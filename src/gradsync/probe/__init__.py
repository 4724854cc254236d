"""The measurement of what the links and this machine can do: a `Cluster` to plan by."""
