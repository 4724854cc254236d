# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The largest elements of each block, on a GPU: found, packed and taken out of the residual in one pass.

    residual   all of v at first, as if nothing were sent: from here on v is in no register
    size       |bf16(v)| as 15 bits, two to a register; a program has one block
    threshold  the largest number that `kept` sizes reach. The `kept`-th of the threads' own largest is a little less,
               and found by counting one number per thread; from there up in strides that double, then by halves
    words      a bit for each size that reaches it; where more than `kept` do, only the first of those equal to it
    code       threads take a bit at a time off their words, lowest first, fetch its value, which is near, and keep
               what of it is not sent

Few elements are kept, so most threads have no bits, and no thread needs a place for each of its elements.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from gradsync.kernels.block_kernels import BlockTable, Mode
from gradsync.kernels.block_tiles_triton import (
    ABSORB,
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

_STRIDE = tl.constexpr(128)  # sizes that lie a factor of two apart
_NAN = tl.constexpr(0x7FC0)
_CHUNK = tl.constexpr(32)
_ELEMENTS_PER_WARP = 1024


def encode(
    block: int, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, payload: torch.Tensor, mode: Mode
) -> None:
    """Do what `block_kernels.encode` does for top-k, on a GPU."""
    arguments = (flat, residual, table.rows, payload)
    lanes = min(block // 4, 32 * _num_warps(block))
    shape = {"BLOCK": block, "WIDTH": max(block, 32), "LANES": lanes, "num_warps": _num_warps(block)}
    _encode_kernel[(len(table.rows),)](*arguments, MODE=int(mode), **shape, **ENCODING)


def decode(block: int, payloads: torch.Tensor, table: BlockTable, flat: torch.Tensor) -> None:
    """Do what `block_kernels.decode` does. Half types are summed in fp32 elsewhere: no block is in registers here."""
    sums = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
    arguments = (payloads, len(payloads), payloads.stride(0), table.rows, flat, sums)
    _decode_kernel[(len(table.rows),)](*arguments, BLOCK=block, ROUND=sums is not flat, num_warps=_num_warps(block))


def _num_warps(block: int) -> int:
    """Several elements of a block for each thread, with their sizes and places."""
    return min(max(1, block // _ELEMENTS_PER_WARP), 16)


# Encoding


@triton.jit
def _encode_kernel(
    flat, residual, rows, payload, BLOCK: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, MODE: tl.constexpr
):
    row = rows + tl.program_id(0) * NUM_COLUMNS
    start, length = tl.load(row + START), tl.load(row + LENGTH)
    if BLOCK == WIDTH and is_plain(start, length, BLOCK) == 1:
        _encode_block(flat, residual, payload, row, start, length, WIDTH, LANES, MODE, True)
    else:
        _encode_block(flat, residual, payload, row, start, length, WIDTH, LANES, MODE, False)


@triton.jit
def _encode_block(
    flat,
    residual,
    payload,
    row,
    start,
    length,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    MODE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    index = tl.arange(0, WIDTH)
    where, within = start + index, index < length
    if WHOLE:
        where = tl.multiple_of(where, 16)
    v = read(flat, where, within, WHOLE)
    if MODE == FEEDBACK:
        v += read(residual, where, within, WHOLE)
    lost = tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 0) >= LOST
    if MODE == FEEDBACK:
        keep(residual, where, v, within, lost, MODE, WHOLE)  # as if nothing were sent
    size = v.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    size = tl.where(lost, 0, size)
    if not WHOLE:
        size = tl.where(within, size, -1)
    kept = tl.load(row + KEPT)
    words = _choose(_pair(size), _floor(size, kept, LANES), tl.max(size, 0) + 1, kept)
    if MODE == ABSORB:
        taken = tl.reshape((words[:, None] >> tl.arange(0, 32)[None, :]) & 1, (WIDTH,)) == 1
        keep(residual, where, v, within & ~taken, lost, MODE, False)
    if MODE == FEEDBACK:
        tl.debug_barrier()  # what was kept is read by other threads
    _write_code(flat, residual, payload, row, start, words, kept, lost, MODE)


@triton.jit
def _floor(size, kept, LANES: tl.constexpr):
    """A threshold that is too small or right: the one for the largest of each group, as each is another element.

    0 where fewer groups have an element than are kept, as in a short block. `high` sinks in every round, so that there
    are nine at most.
    """
    low = tl.zeros_like(kept)
    if LANES >= 32:
        # Groups as elements lie in registers: each is what one thread has.
        largest = tl.max(tl.max(tl.reshape(size, (size.shape[0] // (4 * LANES), LANES, 4)), 2), 0)
        if kept <= LANES:
            high = tl.max(largest, 0) + 1
            number, stride = tl.zeros_like(kept), _STRIDE + 0
            while (number < kept) & (high > 0):
                low = tl.maximum(high - stride, 0)
                number = _count(largest >= low)
                high, stride = tl.where(number < kept, low, high), stride * 2
            while (number != kept) & (high - low > 1):
                middle = (low + high) // 2
                reached = _count(largest >= middle)
                low, high = tl.where(reached < kept, low, middle), tl.where(reached < kept, middle, high)
                number = tl.where(reached < kept, number, reached)
    return low


@triton.jit
def _choose(pairs, low, high, kept):
    """A bit for each element that is kept. `low` is too small or right, `high` is not."""
    number, stride = _count_pairs(pairs, low), 2
    while (number > kept) & (high - low > 1):
        middle = tl.minimum(low + stride, (low + high) // 2)
        reached = _count_pairs(pairs, middle)
        low, high = tl.where(reached < kept, low, middle), tl.where(reached < kept, middle, high)
        number = tl.where(reached < kept, number, reached)
        stride *= 2
    words = _pack(pairs, low)
    if number > kept:
        words = _first(words, _pack(pairs, low + 1), kept)
    return words


@triton.jit
def _first(words, above, kept):
    """Return all of `above`, and of the others in `words` the first, as many as are missing."""
    equal = words ^ above
    number = _count_bits(equal)
    missing = kept - tl.sum(_count_bits(above), 0) - (tl.cumsum(number, 0) - number)
    words = above
    while tl.max(((missing > 0) & (equal != 0)).to(tl.int32), 0) == 1:
        words |= tl.where(missing > 0, equal & (0 - equal), 0)
        equal &= equal - 1
        missing -= 1
    return words


@triton.jit
def _count(bits):
    return tl.sum(bits.to(tl.int32), 0)


@triton.jit
def _pair(size):
    """Two sizes to a word, each under a bit that is set and that a larger number takes away when it is subtracted."""
    first, second = tl.split(tl.reshape(size + 0x8000, (size.shape[0] // 2, 2)))
    return first | (second << 16)


@triton.jit
def _reach(pairs, threshold):
    """Bits 0 and 16 of each word: whether the sizes reach the threshold."""
    return ((pairs - (threshold | (threshold << 16))) >> 15) & 0x00010001


@triton.jit
def _count_pairs(pairs, threshold):
    number = tl.sum(_reach(pairs, threshold), 0)
    return (number & 0xFFFF) + ((number >> 16) & 0xFFFF)


@triton.jit
def _pack(pairs, threshold):
    """A bit for each size that reaches the threshold, 32 to a word."""
    bits = _reach(pairs, threshold)
    bits = (bits | (bits >> 15)) & 3
    return tl.sum(tl.reshape(bits, (pairs.shape[0] // 16, 16)) << (2 * tl.arange(0, 16))[None, :], 1)


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
        where = start + index
        v = read(residual if MODE == FEEDBACK else flat, where, words != 0, False)
        sent = v.to(tl.bfloat16)
        if MODE:
            left = v - (sent.to(tl.float32) + 0.0)  # + 0: there is no −0
            keep(residual, where, left, words != 0, lost, MODE, False)
        value = tl.where(lost, _NAN, sent.to(tl.int16, bitcast=True))
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
