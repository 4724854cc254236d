"""A check that the model fits at all: weights, gradients and Adam's state against what a device holds."""

from __future__ import annotations

import math

from gradsync.cluster import Cluster
from gradsync.planner.profile import ModelProfile
from gradsync.units import show_nbytes

_MASTER = 12  # bytes per 16-bit parameter: Adam's two moments and a copy of the weight, in fp32


def training_nbytes(profile: ModelProfile) -> int:
    """Weights, gradients and Adam's state of one replica; activations come on top.

    >>> import torch
    >>> from gradsync.planner.profile import Gradient
    >>> of = lambda dtype: ModelProfile((Gradient("w", (10,), dtype, 0.0),), 1.0, 1.0)
    >>> training_nbytes(of(torch.bfloat16)), training_nbytes(of(torch.float32))
    (160, 160)
    """
    total = 0
    for gradient in profile.gradients:
        numel = math.prod(gradient.shape)
        total += 2 * gradient.nbytes + _MASTER * numel if gradient.dtype.itemsize == 2 else 4 * gradient.nbytes
    return total


def shortage(profile: ModelProfile, cluster: Cluster) -> list[str]:
    """One sentence if it does not fit; none if it does, or if nobody knows."""
    needed, there = training_nbytes(profile), cluster.device.memory_nbytes
    if not 0 < there < needed:
        return []
    return [
        f"The model does not fit: about {show_nbytes(needed)} for weights, gradients and Adam, "
        f"{show_nbytes(there)} on each GPU; you want FSDP."
    ]
