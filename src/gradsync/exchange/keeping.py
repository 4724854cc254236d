"""What compressors keep between steps, by parameter name, so that it survives another division into buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gradsync.exchange.parcel import Parcel


class Kept(NamedTuple):
    """Rank-local: no other rank has the same residuals."""

    residuals: dict[str, torch.Tensor]  # in the parameter's shape, fp32
    factors: dict[str, torch.Tensor]  # PowerSGD's Q


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


def place(kept: Kept, parcels: Iterable[Parcel]) -> None:
    """Put what is kept where its parameter is now; what has no place there is dropped."""
    for parcel in parcels:
        for item in parcel.items:
            if parcel.residual is not None and item.name in kept.residuals:
                item.of(parcel.residual).copy_(kept.residuals[item.name])
            if item.name in kept.factors:
                parcel.factors[item.name] = kept.factors[item.name].to(parcel.flat.device, copy=True)
