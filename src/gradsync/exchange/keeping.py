"""What compressors keep between steps, by parameter name, so that it survives another division into buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gradsync.compress.powersgd import PowerSGD, matrix, start_q
from gradsync.exchange.parcel import Item, Parcel


class Kept(NamedTuple):
    """Rank-local: no other rank has the same residuals."""

    residuals: dict[str, torch.Tensor]  # in the parameter's shape, fp32
    factors: dict[str, torch.Tensor]  # PowerSGD's Q


def begin(parcels: Iterable[Parcel]) -> Kept:
    """What is kept before the first compressed step: residuals of zero, the first Q."""
    kept = Kept({}, {})
    for parcel in parcels:
        codec, device = parcel.choice.codec, parcel.flat.device
        for item in parcel.items:
            if parcel.choice.feedback:
                kept.residuals[item.name] = torch.zeros(item.shape, device=device, dtype=torch.float32)
            if isinstance(codec, PowerSGD):
                kept.factors[item.name] = start_q(item.param, codec.rank, codec.seed).to(device)
    return kept


def collect(parcels: Iterable[Parcel]) -> Kept:
    """Copies of all that is kept now."""
    kept = Kept({}, {})
    for parcel in parcels:
        for item in parcel.items:
            if parcel.residual is not None:
                kept.residuals[item.name] = item.of(parcel.residual).clone(memory_format=torch.contiguous_format)
            if item.name in parcel.factors:
                kept.factors[item.name] = parcel.factors[item.name].clone()
    return kept


def place(kept: Kept, parcels: Iterable[Parcel]) -> Kept:
    """Put what is kept where its parameter is now; return what has no place there.

    A Q of another shape, from another rank of PowerSGD, is of no use: the first one serves.
    """
    left = Kept(dict(kept.residuals), dict(kept.factors))
    for parcel in parcels:
        for item in parcel.items:
            if parcel.residual is not None and item.name in left.residuals:
                item.of(parcel.residual).copy_(left.residuals.pop(item.name))
            factor = left.factors.pop(item.name, None)
            if factor is not None and _fits(factor, parcel, item):
                parcel.factors[item.name] = factor.to(parcel.flat.device, copy=True)
    return left


def _fits(factor: torch.Tensor, parcel: Parcel, item: Item) -> bool:
    codec = parcel.choice.codec
    return isinstance(codec, PowerSGD) and factor.shape == (matrix(item.param.shape)[1], codec.rank)
