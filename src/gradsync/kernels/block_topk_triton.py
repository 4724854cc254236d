# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The largest elements of each block, on a GPU: found, packed and taken out of the residual in one pass.

    size       |bf16(v)| as 15 bits, in registers; a program has one block
    threshold  the largest number that `kept` sizes reach: down from the block's largest in strides that double,
               then by halves; a step counts the block once
    places     one running count of (sizes above it, sizes equal to it), in the halves of a word, says who is kept
               and where it goes

It counts a block some 8 times, which takes less than the memory needs to bring the next ones.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from gradsync.kernels.block_tiles_triton import (
    BODY,
    FEEDBACK,
    HEAD,
    KEPT,
    LAUNCH,
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
_ELEMENTS_PER_WARP = 512


def encode(
    block: int, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, payload: torch.Tensor, mode: Mode
) -> None:
    """See `blocks.encode`."""
    arguments = (flat, residual, table.rows, payload)
    _encode_kernel[(len(table.rows),)](*arguments, BLOCK=block, MODE=int(mode), num_warps=_num_warps(block), **LAUNCH)


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
def _encode_kernel(flat, residual, rows, payload, BLOCK: tl.constexpr, MODE: tl.constexpr):
    row = rows + tl.program_id(0) * NUM_COLUMNS
    start, length = tl.load(row + START), tl.load(row + LENGTH)
    if is_plain(start, length, BLOCK):
        _encode_block(flat, residual, payload, row, tl.multiple_of(start, 16), length, BLOCK, MODE, True)
    else:
        _encode_block(flat, residual, payload, row, start, length, BLOCK, MODE, False)


@triton.jit
def _encode_block(
    flat, residual, payload, row, start, length, BLOCK: tl.constexpr, MODE: tl.constexpr, WHOLE: tl.constexpr
):
    index = tl.arange(0, BLOCK)
    where, within = start + index, index < length
    v = read(flat, where, within, WHOLE)
    if MODE == FEEDBACK:
        v += read(residual, where, within, WHOLE)
    lost = tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 0) >= LOST
    v = tl.where(lost, 0.0, v)
    values = v.to(tl.bfloat16)
    bits = values.to(tl.int16, bitcast=True)
    size = tl.where(within, bits.to(tl.int32) & 0x7FFF, -1)
    kept = tl.load(row + KEPT)
    chosen, place = _choose(size, kept)
    _write_code(payload, row, kept, index, tl.where(lost, _NAN, bits).to(tl.int16), chosen, place)
    if MODE:
        decoded = tl.where(chosen, values.to(tl.float32) + 0.0, 0.0)  # + 0: see [Codes], there is no −0
        keep(residual, where, v - decoded, within, lost, MODE, WHOLE)


@triton.jit
def _choose(size, kept):
    """Which elements are kept, and the place of each among them."""
    threshold = _threshold(size, kept)
    above, equal = size > threshold, size == threshold
    own = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = (tl.cumsum(own, 0) - own).to(tl.uint32, bitcast=True)  # each below 2**16: it does not count itself
    num_above, num_equal = (before & 0xFFFF).to(tl.int32), (before >> 16).to(tl.int32)
    room = kept - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (num_equal < room)), num_above + tl.minimum(num_equal, room)


@triton.jit
def _threshold(size, kept):
    """The largest number that at least `kept` sizes reach: between low, which they do, and high, which they do not."""
    high = tl.max(size, 0) + 1
    low = tl.maximum(high - _STRIDE, 0)
    stride = _STRIDE * 2
    while _count(size, low) < kept:
        high = low
        low = tl.maximum(high - stride, 0)
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        number = _count(size, middle)
        low = tl.where(number >= kept, middle, low)
        high = tl.where(number > kept, high, tl.where(number == kept, middle + 1, middle))
    return low


@triton.jit
def _count(size, least):
    return tl.sum((size >= least).to(tl.int32), 0)


@triton.jit
def _write_code(payload, row, kept, index, values, chosen, place):
    halves = payload.to(tl.pointer_type(tl.int16))
    head, body = halves + tl.load(row + HEAD) // 2, halves + tl.load(row + BODY) // 2
    tl.store(head + place, index.to(tl.int16), chosen)
    tl.store(body + place, values, chosen)
    rest = kept + tl.arange(0, 8)
    tl.store(head + rest, tl.zeros_like(rest).to(tl.int16), rest < (kept + 1) // 2 * 2)
    tl.store(body + rest, tl.zeros_like(rest).to(tl.int16), rest < (kept + 7) // 8 * 8)


# Decoding


@triton.jit(do_not_specialize=["num_payloads"])
def _decode_kernel(payloads, num_payloads, stride, rows, flat, sums, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    row = rows + tl.program_id(0) * NUM_COLUMNS
    start, length = tl.load(row + START), tl.load(row + LENGTH)
    index = tl.arange(0, BLOCK)
    if is_plain(start, length, BLOCK):
        write(sums, tl.multiple_of(start, 16) + index, tl.zeros((BLOCK,), tl.float32), True, True)
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
