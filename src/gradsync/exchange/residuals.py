"""The state that compressors keep between steps, by parameter name: it survives another division into buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gradsync.exchange.flat import FlatBucket, Item


class KeptState(NamedTuple):
    """The state that one rank keeps: no other rank has the same residuals."""

    residuals: dict[str, torch.Tensor]  # in the parameter's shape, fp32
    factors: dict[str, torch.Tensor]  # what else codecs keep: PowerSGD's Q


def begin(flat_buckets: Iterable[FlatBucket]) -> KeptState:
    """Return what is kept before the first compressed step: residuals of zero, and what codecs start with."""
    kept = KeptState({}, {})
    for flat_bucket in flat_buckets:
        codec, device = flat_bucket.choice.codec, flat_bucket.flat.device
        for item in flat_bucket.items:
            if flat_bucket.choice.feedback:
                kept.residuals[item.name] = torch.zeros(item.shape, device=device, dtype=torch.float32)
            if codec is not None and (start := codec.start(item.param)) is not None:
                kept.factors[item.name] = start.to(device)
    return kept


def collect(flat_buckets: Iterable[FlatBucket]) -> KeptState:
    """Copies of all that is kept now."""
    kept = KeptState({}, {})
    for flat_bucket in flat_buckets:
        for item in flat_bucket.items:
            if flat_bucket.residual is not None:
                kept.residuals[item.name] = item.of(flat_bucket.residual).clone(memory_format=torch.contiguous_format)
            if item.name in flat_bucket.factors:
                kept.factors[item.name] = flat_bucket.factors[item.name].clone()
    return kept


def place(kept: KeptState, flat_buckets: Iterable[FlatBucket]) -> KeptState:
    """Put what is kept where its parameter is now; return what has no place there.

    A factor of another shape, from another rank of PowerSGD say, is of no use: the first one serves.
    """
    left = KeptState(dict(kept.residuals), dict(kept.factors))
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
    start = None if codec is None else codec.start(item.param)
    return start is not None and factor.shape == start.shape
