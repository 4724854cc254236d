"""Top-k: of each block only the largest elements are sent, as bf16 and with their places; the others wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

from gradsync.compress.blocks import MIN_BLOCK, BlockCodec, align
from gradsync.compress.recipe import Compressor, MemoryTraffic, check_block, check_density
from gradsync.compress.wrappers import with_feedback
from gradsync.kernels.block_kernels import MAX_BLOCK, Code, Method

_ENTRY_NBYTES = 2  # a place as uint16, a value as bf16
_HEAD_ALIGN_NBYTES = 4


@dataclass(frozen=True)
class TopK(BlockCodec):
    """The codec of `topk()`: the density and the block, checked."""

    name: ClassVar[str] = "topk"
    traffic = MemoryTraffic(12.1, 4.1)

    density: float
    block: int = 1024

    def __post_init__(self) -> None:
        check_density("topk", self.density)
        object.__setattr__(self, "density", float(self.density))  # 1 and 1.0 are written alike
        check_block("topk", self.block, MIN_BLOCK, MAX_BLOCK)

    def code(self) -> Code:
        return Code(Method.TOPK, self.block)

    def kept(self, length: int) -> int:
        return share(self.density, length)

    def head_nbytes(self, length: int) -> int:
        return align(_ENTRY_NBYTES * self.kept(length), _HEAD_ALIGN_NBYTES)

    def body_nbytes(self, length: int) -> int:
        return align(_ENTRY_NBYTES * self.kept(length))


def topk(density: float, block: int = 1024, feedback: bool = True) -> Compressor:
    """The largest `density` of each block, at least one element of it. Without feedback small gradients never arrive.

    An element that is sent takes 4 bytes, and each block's bytes are rounded up: at a density of 0.01, fp32 shrinks
    73 times in blocks of 1024 and 96 times in blocks of 8192.

    >>> from gradsync.compress.param import Param
    >>> weight = Param("weight", (1024, 1024))
    >>> topk(0.01).choose(weight).nbytes(weight), weight.nbytes
    (57344, 4194304)
    """
    return with_feedback("topk", TopK(density, block), feedback)


@lru_cache(maxsize=4096)  # a planner asks many times
def share(density: float, length: int) -> int:
    """Return how many of `length` elements a density stands for, rounded up.

    >>> share(0.07, 100), share(0.001, 10), share(0.5, 0)
    (7, 1, 0)
    """
    # As written, not as stored: 0.07 · 100 is 7.000000000000001 in floating point.
    return math.ceil(Fraction(str(density)) * length)
