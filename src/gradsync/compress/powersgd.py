"""PowerSGD: a matrix as the product of two thin ones, found by one step of power iteration per synchronization.

    M [rows, cols] ≈ P [rows, rank] · Q [cols, rank]ᵀ

    P = mean over ranks of M·Q;  P = orthogonal(P);  Q = mean over ranks of Mᵀ·P;  Q is kept for the next step

Both means are sums of tensors, so that they ride any all-reduce. Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradsync.compress.recipe import (
    EXACT,
    MAX_SEED,
    Choice,
    Compressor,
    Param,
    check_whole,
    if_real,
    is_number,
    number_of,
)
from gradsync.compress.wrappers import with_feedback


@dataclass(frozen=True)
class PowerSGD:
    """See `powersgd`."""

    name: ClassVar[str] = "powersgd"
    summable: ClassVar[bool] = True

    rank: int = 4
    min_ratio: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("powersgd: rank", self.rank, 1)
        if not is_number(self.min_ratio) or self.min_ratio < 1:
            raise ValueError(
                f"powersgd: min_ratio must be a number of at least 1, got {self.min_ratio!r} "
                "(a gradient that does not shrink by this factor goes as it is)"
            )
        object.__setattr__(self, "min_ratio", float(self.min_ratio))  # 2 and 2.0 are written alike
        check_whole("powersgd: seed", self.seed, 0, MAX_SEED)

    def choose(self, param: Param) -> Choice:
        if len(param.shape) < 2 or self.rank >= min(matrix(param.shape)):
            return EXACT
        return if_real(self, param) if self.nbytes(param) * self.min_ratio <= param.nbytes else EXACT

    def nbytes(self, param: Param) -> int:
        return torch.float32.itemsize * self.rank * sum(matrix(param.shape))


def powersgd(rank: int = 4, min_ratio: float = 2.0, seed: int = 0, feedback: bool = True) -> Compressor:
    """Two factors of this rank instead of a matrix; vectors, and what would not shrink `min_ratio` times, go exactly.

    >>> weight, bias = Param("weight", (1024, 1024)), Param("bias", (1024,))
    >>> powersgd(rank=4).choose(weight).nbytes(weight), weight.nbytes
    (32768, 4194304)
    >>> powersgd(rank=4).choose(bias).label
    'exact'
    """
    return with_feedback("powersgd", PowerSGD(rank, min_ratio, seed), feedback)


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A gradient seen as rows and columns: its first dimension against all others.

    >>> matrix((64, 3, 7, 7))
    (64, 147)
    """
    return shape[0], math.prod(shape[1:])


def start_q(param: Param, rank: int, seed: int) -> torch.Tensor:
    """The first Q [cols, rank]: gaussian, the same on every rank and in every layout.

    >>> start_q(Param("weight", (8, 6)), rank=2, seed=0).shape
    torch.Size([6, 2])
    """
    generator = torch.Generator("cpu").manual_seed(number_of(param.name) ^ seed)
    return torch.randn(matrix(param.shape)[1], rank, generator=generator, dtype=torch.float32, device="cpu")
