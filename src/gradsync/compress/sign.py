"""Signs: one bit per element and the mean size of each block. A thirty-second of fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradsync.compress.blocks import MIN_BLOCK, BlockCodec, align
from gradsync.compress.recipe import Compressor, MemoryTraffic, check_block
from gradsync.compress.wrappers import with_feedback
from gradsync.kernels.block_kernels import MAX_BLOCK, Code, Method


@dataclass(frozen=True)
class Sign(BlockCodec):
    """The codec of `sign()`: a bit per element, a mean per block."""

    name: ClassVar[str] = "sign"
    traffic = MemoryTraffic(12.1, 4.1)

    block: int = 256

    def __post_init__(self) -> None:
        check_block("sign", self.block, MIN_BLOCK, MAX_BLOCK)

    def code(self) -> Code:
        return Code(Method.SIGN, self.block)

    def head_nbytes(self, length: int) -> int:
        return 4

    def body_nbytes(self, length: int) -> int:
        return align(-(-length // 8))


def sign(block: int = 256, feedback: bool = True) -> Compressor:
    """Each element's sign, times the mean of |element| over its block. Without feedback it does not converge.

    >>> from gradsync.compress.param import Param
    >>> weight = Param("weight", (1024, 1024))
    >>> sign().choose(weight).nbytes(weight), weight.nbytes
    (147456, 4194304)
    """
    return with_feedback("sign", Sign(block), feedback)
