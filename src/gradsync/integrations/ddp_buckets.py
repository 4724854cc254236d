"""The buckets that DDP has now, and how each travels; DDP lays them out anew after the first step, and we follow.

A bucket that was not there before is made ready when it comes, on every rank at once, since DDP's buckets are the same
everywhere: ranks compare it, memory is taken together. What compressors keep goes by parameter, from the bucket
that had it to the one that has it now.

A bucket of DDP has one dtype but parameters of any choice. Where they all travel in one way, one flat bucket is laid
out as the bucket is, and DDP takes its result from there. Where they do not, each choice has a flat bucket of its own:

    DDP's bucket   │ weight │ bias │ weight │ bias │        scaled by 1/n on the way in,
    flat buckets        │ weight │ weight │  │ bias │ bias │     copied back into the bucket on the way out
                     PowerSGD            exact
"""

from __future__ import annotations

import math
from itertools import count, islice

import torch
from torch._C._distributed_c10d import GradBucket

from gradsync.compress.recipe import Choice
from gradsync.engine.bucket import GradEntry
from gradsync.errors import GradSyncError
from gradsync.exchange.flat import Allocate, Choose, FlatBucket, Item, lay_out, make_flat_buckets, pack_items
from gradsync.exchange.sender import GradientExchange
from gradsync.integrations.hook_agreement import compare


class DDPBucket:
    """The content of one bucket of DDP; made once, filled and emptied in every step."""

    def __init__(self, sizes: list[int], places: list[list[int]], flat_buckets: list[FlatBucket]) -> None:
        """`places` are for each flat bucket those of DDP's gradients that travel in it, in its order."""
        self.flat_buckets = flat_buckets
        self._sizes = sizes
        self._whole = len(flat_buckets) == 1
        self._places = places
        self._parts = [
            list(flat_bucket.flat.split([sizes[place] for place in here]))
            for here, flat_bucket in zip(places, flat_buckets, strict=True)
        ]

    def pack(self, bucket: torch.Tensor, scale: float) -> None:
        """Take `scale` times DDP's gradients."""
        if self._whole:
            torch.mul(bucket, scale, out=self.flat_buckets[0].flat)
            return
        gradients = bucket.split(self._sizes)
        for flat_bucket, places, parts in zip(self.flat_buckets, self._places, self._parts, strict=True):
            torch._foreach_copy_(parts, [gradients[place] for place in places])
            flat_bucket.flat.mul_(scale)

    def unpack(self, bucket: torch.Tensor) -> torch.Tensor:
        """The averages, laid out as DDP's bucket is: in our memory, or back in its own."""
        if self._whole:
            return self.flat_buckets[0].flat
        gradients = bucket.split(self._sizes)
        for places, parts in zip(self._places, self._parts, strict=True):
            torch._foreach_copy_([gradients[place] for place in places], parts)
        return bucket


def make_ddp_bucket(items: list[Item], choose: Choose, indices: list[int], allocate: Allocate) -> DDPBucket:
    """Make what a bucket with these items, which lie without a gap, travels in; every rank does so at once.

    `indices` are free for its flat buckets: as many as it has items are enough.
    """
    divided = divide(items, choose)
    layouts = [(lay_out([items[place] for place in places], align_nbytes=1), choice) for places, choice in divided]
    flat_buckets = make_flat_buckets(layouts, indices, allocate)
    return DDPBucket([item.param.numel for item in items], [places for places, _ in divided], flat_buckets)


def divide(items: list[Item], choose: Choose) -> list[tuple[list[int], Choice]]:
    """Return which gradients travel in which way, each way packed; a single one stays as it lies."""
    divided = pack_items(items, math.inf, choose)
    return divided if len(divided) > 1 else [(list(range(len(items))), divided[0][1])]


def item_in_bucket(name: str, param: torch.Tensor) -> Item:
    """Lay out a gradient as DDP does: as its parameter where that fills its memory, any other one row by row.

    >>> weight = torch.zeros(2, 6)
    >>> item_in_bucket("weight", weight.t()).strides, item_in_bucket("weight", weight[:, ::2]).strides
    ((1, 6), (3, 1))
    """
    item = Item.like(name, param)
    return item if item.strides == param.stride() else Item.by_rows(name, param)


Key = tuple[int, ...]  # the ids of a bucket's parameters, in order: the entries keep these alive


class DDPBuckets:
    """Finds what a bucket of DDP travels in, or makes it."""

    def __init__(self, entries: list[GradEntry], opened: GradientExchange) -> None:
        self._lane, self._exact, self._sender = opened
        self._entries = {id(entry.param): entry for entry in entries}
        self._ddp_buckets: dict[Key, DDPBucket] = {}
        # A state saved before the first step has the form of one saved later.
        self._sender.expect([self._placeholder(entry) for entry in entries if entry.param.requires_grad])
        self._lane.name_buckets(self._describe)

    def find(self, bucket: GradBucket) -> DDPBucket | None:
        """Return what was made for this bucket, if it was there before."""
        return self._ddp_buckets.get(tuple(map(id, bucket.parameters())))

    def make(self, bucket: GradBucket) -> DDPBucket:
        """Make what a new bucket travels in. Nothing may be under way: threads look through the memory that grows."""
        buffer, params = bucket.buffer(), bucket.parameters()
        # DDP may have buckets of another dtype than the parameters'.
        items = [
            item_in_bucket(self._name(param), param)._replace(dtype=buffer.dtype, device=buffer.device)
            for param in params
        ]
        names, doing = [item.name for item in items], f"bucket {bucket.index()} of DDP"
        compare(self._lane, doing, step=self._lane.step, dtype=str(buffer.dtype), parameters=names)
        key = tuple(map(id, params))
        self._drop(set(key))
        ddp_bucket = make_ddp_bucket(items, self._sender.choose, self._free_indices(len(items)), self._exact.allocate)
        self._sender.add(ddp_bucket.flat_buckets)
        self._ddp_buckets[key] = ddp_bucket
        return ddp_bucket

    def forget(self) -> None:
        """Forget all buckets: they are made anew when they come."""
        self._ddp_buckets = {}

    def _drop(self, params: set[int]) -> None:
        """Drop what held a gradient of one of these parameters: DDP has laid its buckets out anew."""
        for key in [key for key in self._ddp_buckets if not params.isdisjoint(key)]:
            self._sender.remove(self._ddp_buckets.pop(key).flat_buckets)

    def _free_indices(self, num: int) -> list[int]:
        taken = {flat_bucket.index for flat_bucket in self._sender.flat_buckets}
        return list(islice((index for index in count() if index not in taken), num))

    def _name(self, param: torch.Tensor) -> str:
        entry = self._entries.get(id(param))
        if entry is None:
            raise GradSyncError(
                f"{self._lane.place()} DDP brings a parameter of shape {tuple(param.shape)} that this hook does not "
                "know: it was made for another model, or the parameter was replaced; give gs.ddp_hook the model on "
                "which you register the hook"
            )
        return entry.name

    def _placeholder(self, entry: GradEntry) -> FlatBucket:
        """A flat bucket of a parameter whose own is not known yet."""
        item = item_in_bucket(entry.name, entry.param)
        nothing = torch.empty(0, dtype=item.dtype, device=item.device)
        return FlatBucket(-1, nothing, [item], self._sender.choose(item.param))

    def _describe(self, index: int) -> str:
        ours = (flat_bucket for flat_bucket in self._sender.flat_buckets if flat_bucket.index == index)
        return next((flat_bucket.describe() for flat_bucket in ours), f"bucket {index}")
