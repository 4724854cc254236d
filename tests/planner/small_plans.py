"""Models and clusters for the planner's tests."""

from __future__ import annotations

import torch

from gradsync.cluster import Cluster, Link
from gradsync.planner.profile import Gradient, ModelProfile


def profile_of(
    num_layers: int = 8, side: int = 512, backward_s: float = 0.08, dtype: torch.dtype = torch.float32, **more: object
) -> ModelProfile:
    """Equal layers, ready at even times."""
    gradients = tuple(
        Gradient(f"layer{i}", (side, side), dtype, backward_s * (i + 1) / num_layers) for i in range(num_layers)
    )
    return ModelProfile(gradients, backward_s / 2, backward_s, backward_s / 10, **more)  # type: ignore[arg-type]


def cluster_of(bandwidth: float, num_hosts: int = 2, per_host: int = 1, **more: object) -> Cluster:
    """Equal hosts; `bandwidth` is that between them."""
    hosts = tuple(tuple(range(h * per_host, (h + 1) * per_host)) for h in range(num_hosts))
    return Cluster(hosts, Link(5e-6, 5e9), Link(100e-6, bandwidth), **more)  # type: ignore[arg-type]
