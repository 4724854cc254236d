"""Whole numbers: each block is scaled to −127…127 (int8) or −7…7 (int4) and rounded. A quarter or an eighth of fp32."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from gradsync.compress.blocks import MIN_BLOCK, BlockCodec, align
from gradsync.compress.param import key_of
from gradsync.compress.recipe import MAX_SEED, Compressor, MemoryTraffic, check_block, check_whole
from gradsync.compress.wrappers import with_feedback
from gradsync.kernels.block_kernels import MAX_BLOCK, Code, Method

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Integers(BlockCodec, ABC):
    """A whole number per element, a scale per block."""

    method: ClassVar[Method]

    block: int = 256
    rounding: Rounding = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        check_block(self.name, self.block, MIN_BLOCK, MAX_BLOCK)
        if self.rounding not in get_args(Rounding):
            raise ValueError(f'{self.name}: rounding must be "nearest" or "stochastic", got {self.rounding!r}')
        check_whole(f"{self.name}: seed", self.seed, 0, MAX_SEED)

    def code(self) -> Code:
        return Code(self.method, self.block, self.rounding == "stochastic")

    def key(self, step: int, salt: int = 0) -> int:
        return key_of(self.seed, step, salt)

    def head_nbytes(self, length: int) -> int:
        return 4


@dataclass(frozen=True)
class Int8(Integers):
    """The codec of `int8()`: a byte per element, a scale per block."""

    name: ClassVar[str] = "int8"
    traffic = MemoryTraffic(13.0, 5.0)
    method: ClassVar[Method] = Method.INT8

    def body_nbytes(self, length: int) -> int:
        return align(length)


@dataclass(frozen=True)
class Int4(Integers):
    """The codec of `int4()`: half a byte per element, a scale per block."""

    name: ClassVar[str] = "int4"
    traffic = MemoryTraffic(12.5, 4.5)
    method: ClassVar[Method] = Method.INT4

    def body_nbytes(self, length: int) -> int:
        return align(-(-length // 2))


def int8(block: int = 256, rounding: Rounding = "nearest", seed: int = 0, feedback: bool | None = None) -> Compressor:
    """A byte per element and a scale per `block` elements.

    Rounding to the nearest errs the same way again and again, so what it loses is kept and added to the next
    gradient; "stochastic" is right on average and keeps nothing, at the price of noise. `feedback` decides otherwise.

    >>> int8()
    ErrorFeedback(inner=Int8(block=256, rounding='nearest', seed=0))
    >>> int8(rounding="stochastic")
    Int8(block=256, rounding='stochastic', seed=0)
    """
    codec = Int8(block, rounding, seed)
    return with_feedback("int8", codec, rounding == "nearest" if feedback is None else feedback)


def int4(block: int = 256, rounding: Rounding = "nearest", seed: int = 0, feedback: bool | None = None) -> Compressor:
    """Half a byte per element and a scale per `block` elements. See `int8`.

    >>> int4(block=64, feedback=False)
    Int4(block=64, rounding='nearest', seed=0)
    """
    codec = Int4(block, rounding, seed)
    return with_feedback("int4", codec, rounding == "nearest" if feedback is None else feedback)
