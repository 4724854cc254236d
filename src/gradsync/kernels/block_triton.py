# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Block codes on a GPU, in one pass each way: see Note [Codes] in `block_kernels`.

    a program    ROWS blocks as the rows of a tile [ROWS, WIDTH], one warp for 1024 elements: all in registers
    an element   is read once and its residual written once; a block's largest is a reduction inside a warp

What keeps the bits equal to those of `block_torch` is in `block_tiles_triton`, Note [Same bits].
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from gradsync.kernels import block_decode_triton, topk_triton
from gradsync.kernels.block_kernels import BlockTable, Code, Method, Mode
from gradsync.kernels.block_tiles_triton import (
    BODY,
    DECODING,
    ELEMENTS_PER_WARP,
    ENCODING,
    FEEDBACK,
    FIRST,
    HEAD,
    INT4,
    INT8,
    LOST,
    MAGNITUDE,
    NAN,
    PARAM,
    SIGN,
    is_plain,
    keep,
    num_columns,
    num_warps,
    order,
    places,
    read,
    rows_of,
    write,
)

_SMALLEST = tl.constexpr(2.0**-100)
_SIGN_UNIT = tl.constexpr(32768.0)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2**23: a sum with it has the nearest whole number in its low bits
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_LEAST_WIDTH = {Method.INT8: 16, Method.INT4: 32, Method.SIGN: 128}  # elements in 16 bytes of a body


def encode(
    code: Code,
    flat: torch.Tensor,
    residual: torch.Tensor | None,
    table: BlockTable,
    payload: torch.Tensor,
    mode: Mode,
    key: int,
) -> None:
    """Write every block's code into `payload`, and what it loses into `residual`; see `block_kernels.encode`."""
    left = flat if residual is None else residual  # what is no residual is not touched
    if code.method == Method.TOPK:
        topk_triton.encode(code.block, flat, left, table, payload, mode)
        return
    grid, shape = _shape(code, len(table.rows))
    arguments = (flat, left, table.rows, payload, len(table.rows), _salt(key))
    _encode_kernel[grid](*arguments, MODE=int(mode), STOCHASTIC=code.stochastic, **shape, **ENCODING)


def decode(code: Code, payloads: torch.Tensor, table: BlockTable, flat: torch.Tensor) -> None:
    """Set every block of `flat` to the sum of its codes in the rows of `payloads`; see `block_kernels.decode`."""
    if code.method == Method.TOPK:
        topk_triton.decode(code.block, payloads, table, flat)
        return
    grid, shape = _shape(code, len(table.rows))
    arguments = (payloads, len(payloads), payloads.stride(0), table.rows, len(table.rows), flat)
    block_decode_triton.decode_kernel[grid](*arguments, **shape, **DECODING)


def _shape(code: Code, num_blocks: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and what a tile is like."""
    width = max(code.block, _LEAST_WIDTH[code.method])
    rows = max(1, ELEMENTS_PER_WARP // width)
    shape = {"METHOD": int(code.method), "BLOCK": code.block, "WIDTH": width, "ROWS": rows}
    return (triton.cdiv(num_blocks, rows),), shape | {"num_warps": num_warps(width)}


def _salt(key: int) -> int:
    """The key's hash, the same for all elements, as int32: its type must not differ from call to call."""
    x = key & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    x ^= x >> 16
    return x - (x >> 31 << 32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["num_blocks", "salt"])
def _encode_kernel(
    flat,
    residual,
    rows,
    payload,
    num_blocks,
    salt,
    METHOD: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MODE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    row, live, start, length = rows_of(rows, num_blocks, ROWS)
    if BLOCK == WIDTH and tl.min(is_plain(start, length, BLOCK), 0) == 1:
        _encode_tile(flat, residual, payload, row, live, start, length, salt, METHOD, WIDTH, MODE, STOCHASTIC, True)
    else:
        _encode_tile(flat, residual, payload, row, live, start, length, salt, METHOD, WIDTH, MODE, STOCHASTIC, False)


@triton.jit
def _encode_tile(
    flat,
    residual,
    payload,
    row,
    live,
    start,
    length,
    salt,
    METHOD: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,
):
    index = order(length, METHOD, WIDTH, WHOLE)
    where, within = places(start, index, WHOLE), index < length[:, None]
    v = read(flat, where, within, WHOLE)
    if MODE == FEEDBACK:
        v += read(residual, where, within, WHOLE)
    largest = tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 1)
    lost = (largest >= LOST)[:, None]
    m = tl.where(largest >= LOST, 0, largest).to(tl.float32, bitcast=True)
    v = tl.where(lost, 0.0, v)
    if METHOD == SIGN:
        scale = _mean(v, m, length)
        signs = v.to(tl.int32, bitcast=True) & ~MAGNITUDE
        decoded = (scale.to(tl.int32, bitcast=True)[:, None] ^ signs).to(tl.float32, bitcast=True)
        body = _pack_signs((signs == 0) & within & ~lost)
    else:
        q, scale = _integers(v, m, row, live, index, salt, METHOD, STOCHASTIC)
        decoded = q.to(tl.float32) * scale[:, None]
        body = _pack_integers(q, METHOD)
    head = tl.where(largest >= LOST, NAN, scale.to(tl.int32, bitcast=True))
    _write_code(payload, row, live, length, head, body, METHOD, WHOLE)
    if MODE:
        keep(residual, where, v - decoded, within, lost, MODE, WHOLE)


@triton.jit
def _integers(v, m, row, live, index, salt, METHOD: tl.constexpr, STOCHASTIC: tl.constexpr):
    """A whole number for each element, and each block's scale."""
    levels = tl.full(m.shape, 127.0 if METHOD == INT8 else 7.0, tl.float32)
    scale = tl.where(m < _SMALLEST, 0.0, tl.div_rn(m, levels))
    scaled = v * tl.where(m < _SMALLEST, 0.0, tl.div_rn(levels, m))[:, None]
    if STOCHASTIC:
        param = tl.load(row + PARAM, live, 0) ^ salt
        word = tl.load(row + FIRST, live, 0)[:, None] + index
        h = _mix(word.to(tl.uint32, bitcast=True) ^ _mix(param.to(tl.uint32, bitcast=True))[:, None])
        q = tl.floor(scaled + (h >> 8).to(tl.float32) * (2.0**-24))
        q = tl.minimum(tl.maximum(q, -levels[:, None]), levels[:, None]).to(tl.int32)
    else:
        q = (scaled + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    return q, scale


@triton.jit
def _mean(v, m, length):
    """The mean of |v|, from a sum of whole numbers: at most 2**31, which 32 bits without a sign hold."""
    unit = tl.full(m.shape, _SIGN_UNIT, tl.float32)
    over = tl.where(m < _SMALLEST, 0.0, tl.div_rn(unit, m))
    terms = tl.floor(tl.abs(v) * over[:, None] + 0.5).to(tl.int32)
    total = tl.sum(terms, 1).to(tl.uint32, bitcast=True).to(tl.float32)
    return m * tl.div_rn(total, unit * tl.maximum(length, 1).to(tl.float32))


@triton.jit
def _pack_signs(positive):
    """32 signs to a word."""
    bits = tl.reshape(positive.to(tl.int32), (positive.shape[0], positive.shape[1] // 32, 32))
    return tl.sum(bits << tl.arange(0, 32)[None, None, :], 2)


@triton.jit
def _pack_integers(q, METHOD: tl.constexpr):
    """A byte for each number, or for each two: the high half is half a body further on."""
    if METHOD == INT4:
        halves = tl.reshape(q + 8, (q.shape[0], 2, q.shape[1] // 2))
        q = tl.sum(halves << (4 * tl.arange(0, 2))[None, :, None], 1)
    return q.to(tl.uint8)


@triton.jit
def _write_code(payload, row, live, length, scale, body, METHOD: tl.constexpr, WHOLE: tl.constexpr):
    """`body` has a column for each byte, or for each word where it is signs."""
    words = payload.to(tl.pointer_type(tl.int32))
    tl.store(words + tl.load(row + HEAD, live, 0) // 4, scale, live)
    first = tl.multiple_of(tl.load(row + BODY, live, 0), 16)[:, None]
    column = tl.arange(0, body.shape[1])[None, :]
    within = column < num_columns(length, METHOD)[:, None]
    if METHOD == SIGN:
        write(words, first // 4 + column, body, within, WHOLE)
    else:
        write(payload, first + column, body, within, WHOLE)
