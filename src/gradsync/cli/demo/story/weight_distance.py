"""The distance between two copies of a model, measured on all parameters as one vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightDistance:
    """A difference of weights; `relative` is its norm over the norm of the weights."""

    identical: bool  # bit for bit
    max_abs: float
    relative: float


def flatten(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """All parameters as one vector, a copy."""
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def distance(first: torch.Tensor, second: torch.Tensor) -> WeightDistance:
    """The difference of two float32 vectors.

    >>> distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    WeightDistance(identical=False, max_abs=0.5, relative=0.1)
    """
    # As integers: for floats, torch.equal takes 0.0 for -0.0 and no NaN for itself.
    identical = torch.equal(first.view(torch.int32), second.view(torch.int32))
    difference = (first - second).double()
    return WeightDistance(identical, float(difference.abs().max()), float(difference.norm() / first.double().norm()))


def largest_distance(replicas: Sequence[torch.Tensor]) -> WeightDistance:
    """The largest distance between the first replica and any other."""
    distances = [distance(replicas[0], other) for other in replicas[1:]]
    return WeightDistance(
        all(g.identical for g in distances), max(g.max_abs for g in distances), max(g.relative for g in distances)
    )
