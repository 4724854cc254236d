"""Tensors that are averaged whole, again and again: flat memory for them, and how it travels.

    tensors   │ a │ b │ c │ d │            by name, the same on every rank
    ship 0    │ a b │ c d │                parcels of one dtype, device and compressor
    ship 1    │ a b │ c d │                the same once more: one travels while another is filled

What compression keeps between journeys is the fleet's: its ships leave one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch

from gradsync.compress.choice import Choice
from gradsync.exchange.exact import Exact
from gradsync.exchange.memory import Form
from gradsync.exchange.parcel import Item, Parcel
from gradsync.exchange.shipping import Shipping
from gradsync.transport.tickets import Ticket

_ALIGN_NBYTES = 64
_MAX_NBYTES = 25 << 20


class Cargo(NamedTuple):
    """One tensor to be averaged: its name, and one of its shape, dtype and device."""

    name: str
    like: torch.Tensor


class _Hold(NamedTuple):
    """What travels in one parcel."""

    choice: Choice
    items: list[Item]
    form: Form


class Ship:
    """Flat memory for all tensors of a fleet."""

    def __init__(self, parcels: list[Parcel], order: list[str]) -> None:
        self.parcels = parcels
        views = {item.name: item.of(parcel.flat) for parcel in parcels for item in parcel.items}
        self.views = [views[name] for name in order]


class Fleet:
    """Averages a list of tensors; see the picture above."""

    def __init__(
        self,
        cargo: Sequence[Cargo],
        exact: Exact,
        shipping: Shipping,
        indices: count[int],
        max_nbytes: int | None = None,
        num_ships: int = 1,
    ) -> None:
        """Every rank makes it at once. `indices` counts parcels: no two of a shipping have the same."""
        self.names = [each.name for each in cargo]
        self._shipping = shipping
        holds = _load(cargo, shipping, max_nbytes or _MAX_NBYTES)
        self.ships: list[Ship] = []
        for _ in range(num_ships):
            flats = exact.allocate([hold.form for hold in holds])
            parcels = [
                Parcel(next(indices), flat, hold.items, hold.choice) for flat, hold in zip(flats, holds, strict=True)
            ]
            self.ships.append(Ship(parcels, self.names))
        self.enlist()

    def enlist(self) -> None:
        """Take up the journeys, with what waits for these parcels; every rank calls this at once."""
        first = self.ships[0].parcels
        for ship in self.ships:
            for parcel, elder in zip(ship.parcels, first, strict=True):
                if parcel is elder:
                    parcel.residual, parcel.factors = None, {}
                else:
                    parcel.residual, parcel.factors = elder.residual, elder.factors
            self._shipping.add(ship.parcels)

    def launch(self, ship: Ship) -> list[Ticket]:
        """Start adding up what a ship holds, in place."""
        tickets = [self._shipping.launch(parcel) for parcel in ship.parcels]
        self._shipping.flush()
        return tickets

    def describe(self, index: int) -> str | None:
        """The parcel with this index, for people; None if it is none of ours."""
        for parcel in (parcel for ship in self.ships for parcel in ship.parcels):
            if parcel.index == index:
                names = [item.name for item in parcel.items]
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                return f"bucket {index} ({shown})"
        return None


def _load(cargo: Sequence[Cargo], shipping: Shipping, max_nbytes: int) -> list[_Hold]:
    """Which tensors travel together, and where each lies."""
    groups: dict[tuple[torch.dtype, torch.device, Choice], list[list[Cargo]]] = {}
    for each in cargo:
        like = each.like
        choice = shipping.choose(_item(each, 0).param._replace(dtype=like.dtype))
        group = groups.setdefault((like.dtype, like.device, choice), [[]])
        if sum(other.like.nbytes for other in group[-1]) >= max_nbytes:
            group.append([])
        group[-1].append(each)
    return [
        _stow(kind[0], kind[1], kind[2], together) for kind, parts in groups.items() for together in parts if together
    ]


def _stow(dtype: torch.dtype, device: torch.device, choice: Choice, together: list[Cargo]) -> _Hold:
    if choice.codec is not None:
        together = sorted(together, key=lambda each: each.like.shape)  # PowerSGD takes like shapes as one batch
    step = max(1, _ALIGN_NBYTES // dtype.itemsize)
    items, end = [], 0
    for each in together:
        items.append(_item(each, end))
        end += -(-each.like.numel() // step) * step
    return _Hold(choice, items, Form(end, dtype, device))


def _item(each: Cargo, start: int) -> Item:
    strides = torch.empty_like(each.like, device="meta").stride()
    return Item(each.name, start, tuple(each.like.shape), strides)
