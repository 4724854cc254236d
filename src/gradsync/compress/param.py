"""A parameter's gradient, as far as a compressor needs to know it, and numbers that all ranks know without asking."""

from __future__ import annotations

import math
from typing import NamedTuple
from zlib import crc32

import torch


class Param(NamedTuple):
    """A parameter's gradient, as far as a compressor needs to know it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Span(NamedTuple):
    """A parameter's place in a bucket's flat tensor."""

    name: str
    start: int
    numel: int


def number_of(name: str) -> int:
    """A parameter's number, 32 bits: the same on every rank and in every layout.

    >>> number_of("weight")
    130897217
    """
    return crc32(name.encode())


def key_of(seed: int, step: int, salt: int = 0) -> int:
    """32 bits for `kernels.block_torch.dither`, others in every step; `salt` tells phases or ranks apart.

    >>> key_of(0, step=1) == key_of(0, step=1), key_of(0, step=1) == key_of(0, step=2)
    (True, False)
    """
    return crc32(f"{seed} {step} {salt}".encode())
