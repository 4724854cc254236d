"""The way from a sum over the ranks to a mean: each rank brings its part of it.

It is scaled before the sum, by `mean_scale`, for in half types the sum might overflow. Buckets are scaled as they are
filled; tensors that travel seldom, in flat copies: `average` and `level`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from gradsync.compress.recipe import EXACT
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import Item, lay_out, pack_items
from gradsync.transport.lane import Lane


def mean_scale(size: float, op: Literal["mean", "sum"] = "mean", weight: float = 1.0) -> float:
    """Return what a rank multiplies its own by, so that the sum over `size` ranks is their mean; a sum stays one.

    >>> mean_scale(4), mean_scale(4, weight=3.0), mean_scale(4, "sum")
    (0.25, 0.75, 1.0)
    """
    return weight / size if op == "mean" else 1.0


class _Copies(NamedTuple):
    """Tensors of one dtype and device, and copies of them in one piece."""

    tensors: list[torch.Tensor]
    views: list[torch.Tensor]
    flat: torch.Tensor


@torch.no_grad()
def average(lane: Lane, exact: ExactSum, tensors: Sequence[torch.Tensor]) -> None:
    """Make each its mean over the ranks, in place; every rank calls this at once."""
    for copies in _copies(tensors):
        lane.wait(exact.launch(copies.flat.div_(lane.groups.size)))
        torch._foreach_copy_(copies.tensors, copies.views)


@torch.no_grad()
def level(lane: Lane, exact: ExactSum, tensors: Sequence[torch.Tensor]) -> None:
    """Make each its mean, bit for bit what it was where all had the same: a third three times may be less than one.

    mean = a + Σ (b − a) / n        b each rank's own, a that of the group's first
    """
    for copies in _copies(tensors):
        first = copies.flat.clone() if lane.groups.rank == 0 else torch.zeros_like(copies.flat)
        lane.wait(exact.launch(first))
        lane.wait(exact.launch(copies.flat.sub_(first).div_(lane.groups.size)))
        copies.flat.add_(first)
        torch._foreach_copy_(copies.tensors, copies.views)


def _copies(tensors: Sequence[torch.Tensor]) -> Iterator[_Copies]:
    items = [Item.by_rows(f"{number}", tensor) for number, tensor in enumerate(tensors)]
    for numbers, _ in pack_items(items, math.inf, lambda param: EXACT):
        placed, form = lay_out([items[number] for number in numbers])
        flat = form.zeros()
        copies = _Copies([tensors[number] for number in numbers], [item.of(flat) for item in placed], flat)
        torch._foreach_copy_(copies.views, copies.tensors)
        yield copies
