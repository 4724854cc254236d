"""Casts: every element in 16 bits. Half the bytes of fp32, and payloads add up like any tensor."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradsync.compress.recipe import EXACT, Choice, Param


class Cast(ABC):
    """A narrower dtype."""

    name: ClassVar[str]
    summable: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype]

    def choose(self, param: Param) -> Choice:
        wider = param.dtype in (torch.float32, torch.float64)
        return Choice(self) if wider else EXACT

    def nbytes(self, param: Param) -> int:
        return param.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Fp16(Cast):
    """See `fp16`."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class Bf16(Cast):
    """See `bf16`."""

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
