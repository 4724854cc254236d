"""Tensors that are averaged whole, again and again: flat memory for them, and how it travels.

    tensors        │ a │ b │ c │ d │            by name, the same on every rank
    flat part 0    │ a b   │ c d   │            flat buckets of one dtype, device and compressor
    flat part 1    │ a b   │ c d   │            the same once more: one travels while another is filled

What compression keeps between steps is the flat set's: its flat parts leave one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import FlatBucket, Item, lay_out, make_flat_buckets, pack_items
from gradsync.exchange.sender import Sender
from gradsync.transport.pending import Pending

_MAX_NBYTES = 25 << 20


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
        named: Sequence[tuple[str, torch.Tensor]],
        exact: ExactSum,
        sender: Sender,
        indices: count[int],
        max_nbytes: int | None = None,
        num_flat_parts: int = 1,
    ) -> None:
        """Every rank makes it at once. `named` are tensors of the forms that travel, `indices` counts flat buckets.

        No two flat buckets of a sender have the same index.
        """
        self.names = [name for name, _ in named]
        self._sender = sender
        items = [Item.like(name, tensor) for name, tensor in named]
        packed = pack_items(items, max_nbytes or _MAX_NBYTES, sender.choose)
        layouts = [(lay_out([items[number] for number in numbers]), choice) for numbers, choice in packed]
        self.flat_parts = [
            FlatPart(make_flat_buckets(layouts, indices, exact.allocate), self.names) for _ in range(num_flat_parts)
        ]
        self.register()

    def register(self) -> None:
        """Make their routes, with what waits for these flat buckets; every rank calls this at once."""
        first = self.flat_parts[0].flat_buckets
        for flat_part in self.flat_parts:
            for flat_bucket, leading in zip(flat_part.flat_buckets, first, strict=True):
                flat_bucket.keep_with(None if flat_bucket is leading else leading)
            self._sender.add(flat_part.flat_buckets)

    def launch(self, flat_part: FlatPart) -> list[Pending]:
        """Start adding up what a flat part holds, in place."""
        in_flight = [self._sender.launch(flat_bucket) for flat_bucket in flat_part.flat_buckets]
        self._sender.flush()
        return in_flight

    def describe(self, index: int) -> str | None:
        """The flat bucket with this index, for people; None if it is none of ours."""
        ours = (flat_bucket for flat_part in self.flat_parts for flat_bucket in flat_part.flat_buckets)
        return next((flat_bucket.describe() for flat_bucket in ours if flat_bucket.index == index), None)
