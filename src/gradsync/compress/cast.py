"""Casts: every element in 16 bits. Half the bytes of fp32, and payloads add up like any tensor.

Gradients were divided by the number of ranks, so sums do not overflow.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT, Choice, Codec, MemoryTraffic
from gradsync.compress.rounds import CodedBucket, Compute, Payload, Rounds, Sum


class Cast(Codec, ABC):
    """A cast to a narrower dtype."""

    quality = "16-bit"
    traffic = MemoryTraffic(6.0, 6.0)
    dtype: ClassVar[torch.dtype]

    def choose(self, param: Param) -> Choice:
        wider = param.dtype in (torch.float32, torch.float64)
        return Choice(self) if wider else EXACT

    def nbytes(self, param: Param) -> int:
        return param.numel * self.dtype.itemsize

    def rounds(self, bucket: CodedBucket) -> Rounds:
        """One sum."""
        payload = bucket.numbers(bucket.numel, self.dtype)
        yield Compute(lambda step: _encode(bucket, payload), encode=1)
        yield Sum(payload)
        yield Compute(lambda step: bucket.flat.copy_(payload.tensor), decode=1)


def _encode(bucket: CodedBucket, payload: Payload) -> None:
    flat, residual, sent = bucket.flat, bucket.residual, payload.tensor
    if residual is None:
        sent.copy_(flat)
        return
    residual += flat
    sent.copy_(residual)
    residual -= sent
    residual.masked_fill_(~residual.isfinite(), 0)  # what overflowed is seen by the user, and gone afterwards


@dataclass(frozen=True)
class Fp16(Cast):
    """The codec that `fp16()` makes: a cast to torch.float16."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class Bf16(Cast):
    """The codec that `bf16()` makes: a cast to torch.bfloat16."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


def fp16() -> Fp16:
    """Half precision: 11 bits of mantissa, but sums above 65504 overflow to Inf. Scale the loss, or take `bf16`.

    >>> fp16().choose(Param("weight", (4, 4))).label
    'fp16'
    >>> fp16().choose(Param("weight", (4, 4), torch.complex64)).label
    'exact'
    """
    return Fp16()


def bf16() -> Bf16:
    """The range of fp32 with 8 bits of mantissa. What is 16 bits wide already goes as it is.

    >>> bf16().choose(Param("weight", (4, 4))).nbytes(Param("weight", (4, 4)))
    32
    >>> bf16().choose(Param("weight", (4, 4), torch.float16)).label
    'exact'
    """
    return Bf16()
