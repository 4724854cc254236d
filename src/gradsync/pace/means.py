"""Means of tensors that travel seldom, so that they have no memory to travel in: exact, by way of flat copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gradsync.exchange.exact import Exact
from gradsync.transport.lane import Lane


def average(lane: Lane, exact: Exact, tensors: Sequence[torch.Tensor]) -> None:
    """Make each its mean over the ranks, in place; every rank calls this at once."""
    for alike, flat in _flat(tensors):
        lane.wait(exact.launch(flat.div_(lane.groups.size)))
        _unflatten(flat, alike)


def level(lane: Lane, exact: Exact, tensors: Sequence[torch.Tensor]) -> None:
    """The same, and bit for bit what it was where the ranks had equal values: a third three times may be less than one.

    mean = a + Σ (b − a) / n        b each rank's own, a that of the group's first
    """
    for alike, flat in _flat(tensors):
        first = flat.clone() if lane.groups.rank == 0 else torch.zeros_like(flat)
        lane.wait(exact.launch(first))
        gap = flat.sub_(first).div_(lane.groups.size)
        lane.wait(exact.launch(gap))
        _unflatten(first.add_(gap), alike)


def _flat(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Those of one dtype and device, and a copy of them in one piece."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in kinds.values():
        yield alike, torch.cat([tensor.flatten() for tensor in alike])


def _unflatten(flat: torch.Tensor, alike: list[torch.Tensor]) -> None:
    for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
        tensor.copy_(part.view_as(tensor))
