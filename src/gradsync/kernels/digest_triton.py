# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The digest on a GPU: one pass over the words, a sum per program, added up by atomics, which wrap in any order."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from gradsync.kernels.digest import FIRST, SECOND, STRIDE, signed

_BLOCK = 1024  # words of a tile: 8 KiB
_TILES = 4  # of a program


def launch(words: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Do what `digest.launch` does, on a GPU."""
    total = torch.full((1,), nbytes, dtype=torch.int64, device=words.device)
    if words.numel():
        grid = (triton.cdiv(words.numel(), _BLOCK * _TILES),)
        keys = (signed(STRIDE), signed(FIRST), signed(SECOND))
        with torch.cuda.device(words.device):
            _digest_kernel[grid](words, total, words.numel(), *keys, BLOCK=_BLOCK, TILES=_TILES)
    return total[0]


@triton.jit(do_not_specialize=["count"])
def _digest_kernel(words, total, count, STRIDE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
                   BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    sums = tl.zeros((BLOCK,), tl.int64)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    for tile in range(TILES):
        index = first + tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(words + index, index < count, 0) ^ ((index + 1) * STRIDE)
        x = _shifted(x, 32) * FIRST
        x = _shifted(x, 29) * SECOND
        sums += tl.where(index < count, _shifted(x, 32), 0)
    tl.atomic_add(total, tl.sum(sums, 0))


@triton.jit
def _shifted(x, by: tl.constexpr):
    """x ^ x >> by, with zeros from the left."""
    return x ^ (x.to(tl.uint64, bitcast=True) >> by).to(tl.int64, bitcast=True)
