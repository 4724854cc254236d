"""The loads of all buckets that DDP has now; DDP lays them out anew after the first step, and we follow.

A bucket that was not there before is made ready when it comes, on every rank at once, since DDP's buckets are the same
everywhere: ranks compare it, memory is taken together. What compressors keep goes by parameter, from the bucket
that had it to the one that has it now.

A load: the gradients of one bucket of DDP, in the flat buckets in which they travel.

A bucket of DDP has one dtype but parameters of any choice. Where they all travel in one way, the flat bucket is laid
out as
the bucket is, and DDP takes its result from there. Where they do not, each choice has a flat bucket of its own:

    DDP's bucket   │ weight │ bias │ weight │ bias │        scaled by 1/n on the way in,
    flat buckets        │ weight │ weight │  │ bias │ bias │     copied back into the bucket on the way out
                     PowerSGD            exact
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket

from gradsync.compress.recipe import Choice, Param
from gradsync.engine.assemble import Opened
from gradsync.engine.bucket import Entry
from gradsync.errors import GradSyncError
from gradsync.exchange.flat import Allocate, FlatBucket, Form, Item
from gradsync.integrations.hook_agreement import compare


class Share(NamedTuple):
    """The part of a bucket that travels in one way."""

    places: list[int]  # which of the bucket's gradients, in the order of the flat bucket
    items: list[Item]
    choice: Choice


class Load:
    """What one bucket of DDP carries; made once, filled and emptied in every step."""

    def __init__(self, sizes: list[int], shares: list[Share], flat_buckets: list[FlatBucket]) -> None:
        self.flat_buckets = flat_buckets
        self._sizes = sizes
        self._whole = len(flat_buckets) == 1
        self._places = [share.places for share in shares]
        self._parts = [
            list(flat_bucket.flat.split([sizes[place] for place in share.places]))
            for share, flat_bucket in zip(shares, flat_buckets, strict=True)
        ]

    def put_in(self, bucket: torch.Tensor, scale: float) -> None:
        """Take `scale` times DDP's gradients."""
        if self._whole:
            torch.mul(bucket, scale, out=self.flat_buckets[0].flat)
            return
        gradients = bucket.split(self._sizes)
        for flat_bucket, places, parts in zip(self.flat_buckets, self._places, self._parts, strict=True):
            torch._foreach_copy_(parts, [gradients[place] for place in places])
            flat_bucket.flat.mul_(scale)

    def take_out(self, bucket: torch.Tensor) -> torch.Tensor:
        """The averages, laid out as DDP's bucket is: in our memory, or back in its own."""
        if self._whole:
            return self.flat_buckets[0].flat
        gradients = bucket.split(self._sizes)
        for places, parts in zip(self._places, self._parts, strict=True):
            torch._foreach_copy_([gradients[place] for place in places], parts)
        return bucket


def make_load(
    items: list[Item], form: Form, choose: Callable[[Param], Choice], indices: list[int], allocate: Allocate
) -> Load:
    """The load of a bucket of this form with these items, which lie without a gap; every rank makes it at once.

    `indices` are free for its flat_buckets: as many as it has items are enough.
    """
    sizes = [item.param.numel for item in items]
    shares = divide(items, form.dtype, choose)
    flats = allocate([form._replace(numel=sum(item.param.numel for item in share.items)) for share in shares])
    flat_buckets = [
        FlatBucket(index, flat, share.items, share.choice)
        for index, flat, share in zip(indices, flats, shares, strict=False)
    ]
    return Load(sizes, shares, flat_buckets)


def divide(items: list[Item], dtype: torch.dtype, choose: Callable[[Param], Choice]) -> list[Share]:
    """One share for each way to travel, packed; a single one stays as it lies."""
    by_choice: dict[Choice, list[int]] = {}
    for place, item in enumerate(items):
        by_choice.setdefault(choose(item.param._replace(dtype=dtype)), []).append(place)
    if len(by_choice) == 1:
        return [Share(places, items, choice) for choice, places in by_choice.items()]
    # PowerSGD takes like shapes that lie together as one batch.
    return [
        _pack(sorted(places, key=lambda place: items[place].shape), items, choice)
        for choice, places in by_choice.items()
    ]


def _pack(places: list[int], items: list[Item], choice: Choice) -> Share:
    packed, start = [], 0
    for place in places:
        packed.append(items[place]._replace(start=start))
        start += items[place].param.numel
    return Share(places, packed, choice)


def lay_out(named: list[tuple[str, torch.Tensor]]) -> list[Item]:
    """Where DDP has put the gradients of these parameters: one after the other, each as its parameter lies in memory.

    >>> lay_out([("bias", torch.zeros(3)), ("weight", torch.zeros(2, 4).t())])[1]
    Item(name='weight', start=3, shape=(4, 2), strides=(1, 4))
    """
    items, start = [], 0
    for name, param in named:
        items.append(Item(name, start, tuple(param.shape), _strides(param)))
        start += param.numel()
    return items


def _strides(param: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own where it fills its memory; DDP lays out any other one row by row."""
    if torch.empty_like(param, device="meta").stride() == param.stride():
        return param.stride()
    return torch.empty(param.shape, device="meta", dtype=torch.float32).stride()


Key = tuple[int, ...]  # the ids of a bucket's parameters, in order: the entries keep these alive


class Loads:
    """Finds the load of a bucket, or makes it."""

    def __init__(self, entries: list[Entry], opened: Opened) -> None:
        self._lane, self._exact, self._sender = opened
        self._entries = {id(entry.param): entry for entry in entries}
        self._loads: dict[Key, Load] = {}
        # A state saved before the first step has the form of one saved later.
        self._sender.expect([self._stand_in(entry) for entry in entries if entry.param.requires_grad])
        self._lane.name_buckets(self._describe)

    def find(self, bucket: GradBucket) -> Load | None:
        """Its load, if this bucket was there before."""
        return self._loads.get(tuple(map(id, bucket.parameters())))

    def make(self, bucket: GradBucket) -> Load:
        """The load of a new bucket. Nothing may be under way: other threads look through the memory that grows."""
        buffer, params = bucket.buffer(), bucket.parameters()
        items = lay_out([(self._name(param), param) for param in params])
        names, doing = [item.name for item in items], f"bucket {bucket.index()} of DDP"
        compare(self._lane, doing, step=self._lane.step, dtype=str(buffer.dtype), parameters=names)
        key = tuple(map(id, params))
        self._drop(set(key))
        form = Form(buffer.numel(), buffer.dtype, buffer.device)
        load = make_load(items, form, self._sender.choose, self._free_indices(len(items)), self._exact.allocate)
        self._sender.add(load.flat_buckets)
        self._loads[key] = load
        return load

    def forget(self) -> None:
        """All are made anew when they come."""
        self._loads = {}

    def _drop(self, params: set[int]) -> None:
        """What held a gradient of one of these parameters: DDP has laid its buckets out anew."""
        for key in [key for key in self._loads if not params.isdisjoint(key)]:
            self._sender.remove(self._loads.pop(key).flat_buckets)

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

    def _stand_in(self, entry: Entry) -> FlatBucket:
        """For a parameter whose bucket is not known yet."""
        [item] = lay_out([(entry.name, entry.param)])
        choice = self._sender.choose(item.param._replace(dtype=entry.param.dtype))
        return FlatBucket(-1, torch.empty(0, dtype=entry.param.dtype, device=entry.param.device), [item], choice)

    def _describe(self, index: int) -> str:
        names = [
            item.name
            for flat_bucket in self._sender.flat_buckets
            if flat_bucket.index == index
            for item in flat_bucket.items
        ]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"bucket {index} ({shown})"
