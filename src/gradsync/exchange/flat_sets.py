"""Tensors that are averaged whole, again and again: flat memory for them, and how it travels.

    tensors   │ a │ b │ c │ d │            by name, the same on every rank
    flat part 0    │ a b │ c d │                flat buckets of one dtype, device and compressor
    flat part 1    │ a b │ c d │                the same once more: one travels while another is filled

What compression keeps between journeys is the flat set's: its flat parts leave one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch

from gradsync.compress.recipe import Choice
from gradsync.exchange.choose_route import Exact
from gradsync.exchange.flat import FlatBucket, Form, Item
from gradsync.exchange.sender import Sender
from gradsync.transport.pending import Pending

_ALIGN_NBYTES = 64
_MAX_NBYTES = 25 << 20


class FlatItem(NamedTuple):
    """One tensor to be averaged: its name, and one of its shape, dtype and device."""

    name: str
    like: torch.Tensor


class _Hold(NamedTuple):
    """What travels in one flat bucket."""

    choice: Choice
    items: list[Item]
    form: Form


class FlatPart:
    """Flat memory for all tensors of a flat set."""

    def __init__(self, flat_buckets: list[FlatBucket], order: list[str]) -> None:
        self.flat_buckets = flat_buckets
        views = {item.name: item.of(flat_bucket.flat) for flat_bucket in flat_buckets for item in flat_bucket.items}
        self.views = [views[name] for name in order]


class FlatSet:
    """Averages a list of tensors; see the picture above."""

    def __init__(
        self,
        cargo: Sequence[FlatItem],
        exact: Exact,
        sender: Sender,
        indices: count[int],
        max_nbytes: int | None = None,
        num_flat_parts: int = 1,
    ) -> None:
        """Every rank makes it at once. `indices` counts flat_buckets: no two of a sender have the same."""
        self.names = [each.name for each in cargo]
        self._sender = sender
        holds = _load(cargo, sender, max_nbytes or _MAX_NBYTES)
        self.flat_parts: list[FlatPart] = []
        for _ in range(num_flat_parts):
            flats = exact.allocate([hold.form for hold in holds])
            flat_buckets = [
                FlatBucket(next(indices), flat, hold.items, hold.choice)
                for flat, hold in zip(flats, holds, strict=True)
            ]
            self.flat_parts.append(FlatPart(flat_buckets, self.names))
        self.enlist()

    def enlist(self) -> None:
        """Take up the journeys, with what waits for these flat buckets; every rank calls this at once."""
        first = self.flat_parts[0].flat_buckets
        for flat_part in self.flat_parts:
            for flat_bucket, elder in zip(flat_part.flat_buckets, first, strict=True):
                if flat_bucket is elder:
                    flat_bucket.residual, flat_bucket.factors = None, {}
                else:
                    flat_bucket.residual, flat_bucket.factors = elder.residual, elder.factors
            self._sender.add(flat_part.flat_buckets)

    def launch(self, flat_part: FlatPart) -> list[Pending]:
        """Start adding up what a flat part holds, in place."""
        in_flight = [self._sender.launch(flat_bucket) for flat_bucket in flat_part.flat_buckets]
        self._sender.flush()
        return in_flight

    def describe(self, index: int) -> str | None:
        """The flat bucket with this index, for people; None if it is none of ours."""
        for flat_bucket in (flat_bucket for flat_part in self.flat_parts for flat_bucket in flat_part.flat_buckets):
            if flat_bucket.index == index:
                names = [item.name for item in flat_bucket.items]
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                return f"bucket {index} ({shown})"
        return None


def _load(cargo: Sequence[FlatItem], sender: Sender, max_nbytes: int) -> list[_Hold]:
    """Which tensors travel together, and where each lies."""
    groups: dict[tuple[torch.dtype, torch.device, Choice], list[list[FlatItem]]] = {}
    for each in cargo:
        like = each.like
        choice = sender.choose(_item(each, 0).param._replace(dtype=like.dtype))
        group = groups.setdefault((like.dtype, like.device, choice), [[]])
        if sum(other.like.nbytes for other in group[-1]) >= max_nbytes:
            group.append([])
        group[-1].append(each)
    return [
        _stow(kind[0], kind[1], kind[2], together) for kind, parts in groups.items() for together in parts if together
    ]


def _stow(dtype: torch.dtype, device: torch.device, choice: Choice, together: list[FlatItem]) -> _Hold:
    if choice.codec is not None:
        together = sorted(together, key=lambda each: each.like.shape)  # PowerSGD takes like shapes as one batch
    step = max(1, _ALIGN_NBYTES // dtype.itemsize)
    items, end = [], 0
    for each in together:
        items.append(_item(each, end))
        end += -(-each.like.numel() // step) * step
    return _Hold(choice, items, Form(end, dtype, device))


def _item(each: FlatItem, start: int) -> Item:
    strides = torch.empty_like(each.like, device="meta").stride()
    return Item(each.name, start, tuple(each.like.shape), strides)
