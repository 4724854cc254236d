# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Integers and signs of blocks back into a flat tensor, on a GPU: the codes of all ranks are added in registers."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from gradsync.kernels.block_tiles_triton import (
    BODY,
    HEAD,
    INT4,
    SIGN,
    is_plain,
    num_columns,
    order,
    places,
    rows_of,
    write,
)


@triton.jit(do_not_specialize=["num_payloads", "num_blocks"])
def decode_kernel(
    payloads,
    num_payloads,
    stride,
    rows,
    num_blocks,
    flat,
    METHOD: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Set the blocks of a tile to the sums of their codes, `stride` bytes from one payload to the next."""
    row, live, start, length = rows_of(rows, num_blocks, ROWS)
    head, body = tl.load(row + HEAD, live, 0), tl.multiple_of(tl.load(row + BODY, live, 0), 16)
    if BLOCK == WIDTH and tl.min(is_plain(start, length, BLOCK), 0) == 1:
        total = _sum(payloads, num_payloads, stride, head, body, length, METHOD, WIDTH, True)
        write(flat, places(start, order(length, METHOD, WIDTH, True), True), total, True, True)
    else:
        total = _sum(payloads, num_payloads, stride, head, body, length, METHOD, WIDTH, False)
        index = order(length, METHOD, WIDTH, False)
        write(flat, start[:, None] + index, total, index < length[:, None], False)


@triton.jit
def _sum(
    payloads, num_payloads, stride, head, body, length, METHOD: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
):
    """The codes added in order, from the first on: adding it to zero would turn −0 into 0."""
    total = _decoded(payloads, head, body, length, METHOD, WIDTH, WHOLE)
    for i in range(1, num_payloads):
        total += _decoded(payloads + tl.cast(i, tl.int64) * stride, head, body, length, METHOD, WIDTH, WHOLE)
    return total


@triton.jit
def _decoded(payload, head, body, length, METHOD: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    scale = tl.load(payload.to(tl.pointer_type(tl.int32)) + head // 4, length > 0, 0)
    if METHOD == SIGN:
        words = _body(payload.to(tl.pointer_type(tl.int32)), body // 4, length, METHOD, WIDTH // 32, WHOLE)
        negative = ~(words[:, :, None] >> tl.arange(0, 32)[None, None, :]) << 31
        decoded = scale[:, None] ^ tl.reshape(negative, (body.shape[0], WIDTH))
        values = decoded.to(tl.float32, bitcast=True)
    elif METHOD == INT4:
        packed = _body(payload, body, length, METHOD, WIDTH // 2, WHOLE).to(tl.int32)
        halves = (packed[:, None, :] >> (4 * tl.arange(0, 2))[None, :, None]) & 15
        q = tl.reshape(halves, (body.shape[0], WIDTH)) - 8
        values = q.to(tl.float32) * scale.to(tl.float32, bitcast=True)[:, None]
    else:
        q = _body(payload.to(tl.pointer_type(tl.int8)), body, length, METHOD, WIDTH, WHOLE)
        values = q.to(tl.float32) * scale.to(tl.float32, bitcast=True)[:, None]
    return values


@triton.jit
def _body(codes, first, length, METHOD: tl.constexpr, NUM_COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """The bodies of a tile's blocks, a row each."""
    column = tl.arange(0, NUM_COLUMNS)[None, :]
    if WHOLE:
        values = tl.load(codes + first[:, None] + column)
    else:
        values = tl.load(codes + first[:, None] + column, column < num_columns(length, METHOD)[:, None], 0)
    return values
