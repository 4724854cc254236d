# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The parts that GPU kernels of block codes share: numbers of the format, and tiles that are read and written.

Note [Same bits]
    Kernels are launched with `enable_fp_fusion=False`, divide with `div_rn`, and look for the largest among bit
    patterns, whose order is that of absolute values and does not forget NaN. Signs are
    bits: 0 − x is not −x for a zero.

Note [Whole tiles]
    A mask that may end anywhere keeps the compiler from moving 16 bytes at a time. So a tile of whole blocks on
    borders of 16 elements, as all but the last block of a parameter are, takes a way without masks.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from gradsync.kernels import block_kernels

INT8, INT4, SIGN = (tl.constexpr(int(block_kernels.Method[name])) for name in ("INT8", "INT4", "SIGN"))
FEEDBACK, ABSORB = (tl.constexpr(int(block_kernels.Mode[name])) for name in ("FEEDBACK", "ABSORB"))
START, LENGTH, HEAD, BODY, FIRST, PARAM, KEPT = (tl.constexpr(column) for column in range(7))
NUM_COLUMNS = tl.constexpr(7)

MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # of the bits of a float, those without its sign
LOST = tl.constexpr(0x7F000000)  # the bits of 2**127
NAN = tl.constexpr(0x7FC00000)

# Enough for a warp to have 16 wide reads under way, few enough for its registers.
ELEMENTS_PER_WARP = 1024
_MAX_WARPS = 16

# For [Same bits]; and a bound on registers, which the way of whole tiles hardly needs: what has to spill is the other.
ENCODING = {"enable_fp_fusion": False, "maxnreg": 128}
DECODING = {"enable_fp_fusion": False, "maxnreg": 64}


def num_warps(width: int) -> int:
    """The warps for a tile with rows of so many elements: one if it can be, which then reduces without barriers."""
    return min(max(1, width // ELEMENTS_PER_WARP), _MAX_WARPS)


@triton.jit
def rows_of(rows, num_blocks, ROWS: tl.constexpr):
    """The program's rows of the table, and which of them there are."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = at < num_blocks
    row = rows + at * NUM_COLUMNS
    return row, live, tl.load(row + START, live, 0), tl.load(row + LENGTH, live, 0)


@triton.jit
def order(length, METHOD: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Return which element of its block is at each place of a tile: halves of bytes lie half a body apart."""
    column = tl.arange(0, WIDTH)[None, :]
    if METHOD == INT4 and not WHOLE:
        half = ((length + 31) // 32 * 16)[:, None]
        body = column % (WIDTH // 2)
        index = tl.where(body < half, column // (WIDTH // 2) * half + body, WIDTH)
    else:
        index = column + tl.zeros_like(length)[:, None]
    return index


@triton.jit
def num_columns(length, METHOD: tl.constexpr):
    """The columns of a body, which fills pieces of 16 bytes: bytes, or words where it is signs."""
    if METHOD == SIGN:
        number = (length + 127) // 128 * 4
    else:
        number = (length + 15) // 16 * 16 if METHOD == INT8 else (length + 31) // 32 * 16
    return number


@triton.jit
def is_plain(start, length, BLOCK: tl.constexpr):
    """Return whether blocks are whole and on a border; see [Whole tiles]."""
    return ((length == BLOCK) & (start % 16 == 0)).to(tl.int32)


@triton.jit
def places(start, index, WHOLE: tl.constexpr):
    """A tile's elements in the flat tensor. The hint is for this tile: `start` itself is that of the other way too."""
    where = start[:, None] + index
    return tl.multiple_of(where, (1, 16)) if WHOLE else where


@triton.jit
def read(tensor, where, within, WHOLE: tl.constexpr):
    """A tile's elements; 0 outside of the blocks."""
    values = tl.load(tensor + where) if WHOLE else tl.load(tensor + where, within, 0.0)
    return values.to(tl.float32)


@triton.jit
def write(tensor, where, values, within, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(tensor + where, values)
    else:
        tl.store(tensor + where, values, within)


@triton.jit
def keep(residual, where, left, within, lost, MODE: tl.constexpr, WHOLE: tl.constexpr):
    """Write what the code left of a tile, as [Residuals] says; a block that is lost keeps what it had."""
    if MODE == ABSORB:
        left = read(residual, where, within, WHOLE) + left
    if WHOLE:
        tl.store(residual + where, left, ~lost)
    else:
        tl.store(residual + where, left, within & ~lost)
