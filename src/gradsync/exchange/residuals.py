"""What compressors keep between steps, by parameter name, so that it survives another division into buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gradsync.compress.powersgd import PowerSGD, matrix, start_q
from gradsync.exchange.flat import FlatBucket, Item


class Kept(NamedTuple):
    """Rank-local: no other rank has the same residuals."""

    residuals: dict[str, torch.Tensor]  # in the parameter's shape, fp32
    factors: dict[str, torch.Tensor]  # PowerSGD's Q


def begin(flat_buckets: Iterable[FlatBucket]) -> Kept:
    """What is kept before the first compressed step: residuals of zero, the first Q."""
    kept = Kept({}, {})
    for flat_bucket in flat_buckets:
        codec, device = flat_bucket.choice.codec, flat_bucket.flat.device
        for item in flat_bucket.items:
            if flat_bucket.choice.feedback:
                kept.residuals[item.name] = torch.zeros(item.shape, device=device, dtype=torch.float32)
            if isinstance(codec, PowerSGD):
                kept.factors[item.name] = start_q(item.param, codec.rank, codec.seed).to(device)
    return kept


def collect(flat_buckets: Iterable[FlatBucket]) -> Kept:
    """Copies of all that is kept now."""
    kept = Kept({}, {})
    for flat_bucket in flat_buckets:
        for item in flat_bucket.items:
            if flat_bucket.residual is not None:
                kept.residuals[item.name] = item.of(flat_bucket.residual).clone(memory_format=torch.contiguous_format)
            if item.name in flat_bucket.factors:
                kept.factors[item.name] = flat_bucket.factors[item.name].clone()
    return kept


def place(kept: Kept, flat_buckets: Iterable[FlatBucket]) -> Kept:
    """Put what is kept where its parameter is now; return what has no place there.

    A Q of another shape, from another rank of PowerSGD, is of no use: the first one serves.
    """
    left = Kept(dict(kept.residuals), dict(kept.factors))
    for flat_bucket in flat_buckets:
        for item in flat_bucket.items:
            if flat_bucket.residual is not None and item.name in left.residuals:
                item.of(flat_bucket.residual).copy_(left.residuals.pop(item.name))
            factor = left.factors.pop(item.name, None)
            if factor is not None and _fits(factor, flat_bucket, item):
                flat_bucket.factors[item.name] = factor.to(flat_bucket.flat.device, copy=True)
    return left


def _fits(factor: torch.Tensor, flat_bucket: FlatBucket, item: Item) -> bool:
    codec = flat_bucket.choice.codec
    return isinstance(codec, PowerSGD) and factor.shape == (matrix(item.param.shape)[1], codec.rank)
