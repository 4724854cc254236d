"""A load: the gradients of one bucket of DDP, in the parcels in which they travel.

A bucket of DDP has one dtype but parameters of any choice. Where they all travel in one way, the parcel is laid out as
the bucket is, and DDP takes its result from there. Where they do not, each choice has a parcel of its own:

    DDP's bucket   │ weight │ bias │ weight │ bias │        scaled by 1/n on the way in,
    parcels        │ weight │ weight │  │ bias │ bias │     copied back into the bucket on the way out
                     PowerSGD            exact
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from gradsync.compress.choice import Choice, Param
from gradsync.exchange.memory import Allocate, Form
from gradsync.exchange.parcel import Item, Parcel


class Share(NamedTuple):
    """The part of a bucket that travels in one way."""

    places: list[int]  # which of the bucket's gradients, in the order of the parcel
    items: list[Item]
    choice: Choice


class Load:
    """What one bucket of DDP carries; made once, filled and emptied in every step."""

    def __init__(self, sizes: list[int], shares: list[Share], parcels: list[Parcel]) -> None:
        self.parcels = parcels
        self._sizes = sizes
        self._whole = len(parcels) == 1
        self._places = [share.places for share in shares]
        self._parts = [
            list(parcel.flat.split([sizes[place] for place in share.places]))
            for share, parcel in zip(shares, parcels, strict=True)
        ]

    def put_in(self, bucket: torch.Tensor, scale: float) -> None:
        """Take `scale` times DDP's gradients."""
        if self._whole:
            torch.mul(bucket, scale, out=self.parcels[0].flat)
            return
        gradients = bucket.split(self._sizes)
        for parcel, places, parts in zip(self.parcels, self._places, self._parts, strict=True):
            torch._foreach_copy_(parts, [gradients[place] for place in places])
            parcel.flat.mul_(scale)

    def take_out(self, bucket: torch.Tensor) -> torch.Tensor:
        """The averages, laid out as DDP's bucket is: in our memory, or back in its own."""
        if self._whole:
            return self.parcels[0].flat
        gradients = bucket.split(self._sizes)
        for places, parts in zip(self._places, self._parts, strict=True):
            torch._foreach_copy_([gradients[place] for place in places], parts)
        return bucket


def make_load(
    items: list[Item], form: Form, choose: Callable[[Param], Choice], indices: list[int], allocate: Allocate
) -> Load:
    """The load of a bucket of this form with these items, which lie without a gap; every rank makes it at once.

    `indices` are free for its parcels: as many as it has items are enough.
    """
    sizes = [item.param.numel for item in items]
    shares = divide(items, form.dtype, choose)
    flats = allocate([form._replace(numel=sum(item.param.numel for item in share.items)) for share in shares])
    parcels = [
        Parcel(index, flat, share.items, share.choice)
        for index, flat, share in zip(indices, flats, shares, strict=False)
    ]
    return Load(sizes, shares, parcels)


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
