# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The largest elements of each block, on a GPU: found, packed and taken out of the residual in one pass.

    size       |bf16(v)| as 15 bits, in registers; a program has one block
    threshold  the largest number that `kept` sizes reach: down from the block's largest in strides that double,
               then by halves; a step counts the block once
    end        where more than `kept` reach it, equal ones count only in front of this index: again by halves
    words      a bit for each element that is kept; a thread has a word or two
    code       threads take a bit at a time off their words, lowest first, and fetch its value once more: it is near

Few elements are kept, so most threads have no bits, and no thread needs a place for each of its elements.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from gradsync.kernels.block_tiles_triton import (
    BODY,
    ENCODING,
    FEEDBACK,
    HEAD,
    KEPT,
    LENGTH,
    LOST,
    MAGNITUDE,
    NUM_COLUMNS,
    START,
    is_plain,
    keep,
    read,
    write,
)
from gradsync.kernels.blocks import BlockTable, Mode

_STRIDE = tl.constexpr(128)  # sizes that lie a factor of two apart
_NAN = tl.constexpr(0x7FC0)
_CHUNK = tl.constexpr(32)
_ELEMENTS_PER_WARP = 1024


def encode(
    block: int, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, payload: torch.Tensor, mode: Mode
) -> None:
    """See `blocks.encode`."""
    arguments = (flat, residual, table.rows, payload)
    shape = {"BLOCK": block, "WIDTH": max(block, 32), "num_warps": _num_warps(block)}
    _encode_kernel[(len(table.rows),)](*arguments, MODE=int(mode), **shape, **ENCODING)


def decode(block: int, payloads: torch.Tensor, table: BlockTable, flat: torch.Tensor) -> None:
    """See `blocks.decode`. Sums in half types are made in fp32 elsewhere: a block is not in registers here."""
    sums = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
    arguments = (payloads, len(payloads), payloads.stride(0), table.rows, flat, sums)
    _decode_kernel[(len(table.rows),)](*arguments, BLOCK=block, ROUND=sums is not flat, num_warps=_num_warps(block))


def _num_warps(block: int) -> int:
    """Several elements of a block for each thread, with their sizes and places."""
    return min(max(1, block // _ELEMENTS_PER_WARP), 16)


# Encoding


@triton.jit
def _encode_kernel(flat, residual, rows, payload, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr):
    row = rows + tl.program_id(0) * NUM_COLUMNS
    start, length = tl.load(row + START), tl.load(row + LENGTH)
    if BLOCK == WIDTH and is_plain(start, length, BLOCK) == 1:
        _encode_block(flat, residual, payload, row, start, length, WIDTH, MODE, True)
    else:
        _encode_block(flat, residual, payload, row, start, length, WIDTH, MODE, False)


@triton.jit
def _encode_block(
    flat, residual, payload, row, start, length, WIDTH: tl.constexpr, MODE: tl.constexpr, WHOLE: tl.constexpr
):
    index = tl.arange(0, WIDTH)
    where, within = start + index, index < length
    if WHOLE:
        where = tl.multiple_of(where, 16)
    v = read(flat, where, within, WHOLE)
    if MODE == FEEDBACK:
        v += read(residual, where, within, WHOLE)
    lost = tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 0) >= LOST
    v = tl.where(lost, 0.0, v)
    size = v.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    if not WHOLE:
        size = tl.where(within, size, -1)
    kept = tl.load(row + KEPT)
    threshold, end = _bounds(size, index, kept, WIDTH)
    taken = size + (index < end).to(tl.int32) > threshold
    _write_code(flat, residual, payload, row, start, _pack(taken), kept, lost, MODE)
    if MODE:
        tl.debug_barrier()  # what is overwritten now was read once more
        bits = (size << 16) | (v.to(tl.int32, bitcast=True) & ~MAGNITUDE)
        decoded = tl.where(taken, bits.to(tl.float32, bitcast=True) + 0.0, 0.0)  # + 0: there is no −0
        keep(residual, where, v - decoded, within, lost, MODE, WHOLE)


@triton.jit
def _bounds(size, index, kept, WIDTH: tl.constexpr):
    """The threshold, and the end for those equal to it. `low` is too small or right, `high` and `first` are not."""
    high = tl.max(size, 0) + 1
    low = tl.maximum(high - _STRIDE, 0)
    stride, number = _STRIDE * 2, _count(size >= low)
    while number < kept:
        high = low
        low = tl.maximum(high - stride, 0)
        stride, number = stride * 2, _count(size >= low)
    while (number != kept) & (high - low > 1):
        middle = (low + high) // 2
        reached = _count(size >= middle)
        low, high = tl.where(reached < kept, low, middle), tl.where(reached < kept, middle, high)
        number = tl.where(reached < kept, number, reached)
    first, end = tl.zeros_like(kept), tl.zeros_like(kept) + WIDTH
    while number != kept:
        middle = (first + end) // 2
        reached = _count(size + (index < middle).to(tl.int32) > low)
        first, end = tl.where(reached < kept, middle, first), tl.where(reached < kept, end, middle)
        number = tl.where(reached < kept, number, reached)
    return low, end


@triton.jit
def _count(bits):
    return tl.sum(bits.to(tl.int32), 0)


@triton.jit
def _pack(bits):
    """32 bits to a word."""
    return tl.sum(tl.reshape(bits.to(tl.int32), (bits.shape[0] // 32, 32)) << tl.arange(0, 32)[None, :], 1)


@triton.jit
def _count_bits(word):
    x = word.to(tl.uint32, bitcast=True)
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _write_code(flat, residual, payload, row, start, words, kept, lost, MODE: tl.constexpr):
    halves = payload.to(tl.pointer_type(tl.int16))
    head, body = halves + tl.load(row + HEAD) // 2, halves + tl.load(row + BODY) // 2
    first = 32 * tl.arange(0, words.shape[0])
    number = _count_bits(words)
    place = tl.cumsum(number, 0) - number
    while tl.max((words != 0).to(tl.int32), 0) == 1:
        bit = words & (0 - words)  # the lowest; as a float it is its own exponent
        index = first + (bit.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        v = read(flat, start + index, words != 0, False)
        if MODE == FEEDBACK:
            v += read(residual, start + index, words != 0, False)
        value = tl.where(lost, _NAN, v.to(tl.bfloat16).to(tl.int16, bitcast=True))
        tl.store(head + place, index.to(tl.int16), words != 0)
        tl.store(body + place, value.to(tl.int16), words != 0)
        place += 1
        words ^= bit
    rest = kept + tl.arange(0, 8)
    nothing = tl.zeros_like(rest).to(tl.int16)
    tl.store(head + rest, nothing, rest < (kept + 1) // 2 * 2)
    tl.store(body + rest, nothing, rest < (kept + 7) // 8 * 8)


# Decoding


@triton.jit(do_not_specialize=["num_payloads"])
def _decode_kernel(payloads, num_payloads, stride, rows, flat, sums, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    row = rows + tl.program_id(0) * NUM_COLUMNS
    start, length = tl.load(row + START), tl.load(row + LENGTH)
    index = tl.arange(0, BLOCK)
    if is_plain(start, length, BLOCK):
        write(sums, tl.multiple_of(start + index, 16), tl.zeros((BLOCK,), tl.float32), True, True)
    else:
        write(sums, start + index, tl.zeros((BLOCK,), tl.float32), index < length, False)
    for i in range(num_payloads):
        tl.debug_barrier()  # what other threads of this program wrote
        _add(payloads + tl.cast(i, tl.int64) * stride, row, sums + start)
    if ROUND:
        tl.debug_barrier()
        write(flat, start + index, read(sums, start + index, index < length, False), index < length, False)


@triton.jit
def _add(payload, row, sums):
    halves = payload.to(tl.pointer_type(tl.int16))
    head, body = halves + tl.load(row + HEAD) // 2, halves + tl.load(row + BODY) // 2
    kept = tl.load(row + KEPT)
    for first in range(0, kept, _CHUNK):
        entry = first + tl.arange(0, _CHUNK)
        place = sums + (tl.load(head + entry, entry < kept, 0).to(tl.int32) & 0xFFFF)
        value = tl.load(body + entry, entry < kept, 0).to(tl.bfloat16, bitcast=True).to(tl.float32)
        tl.store(place, tl.load(place, entry < kept, 0.0) + value, entry < kept)
