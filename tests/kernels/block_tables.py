"""Tables of blocks for tests: heads of all blocks first, then bodies, each rounded up as Note [Codes] says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.kernels.blocks import ALIGN_NBYTES, BlockTable, Method


def make_table(method: Method, blocks: Sequence[tuple[int, int, int]], gap: int = 0) -> tuple[BlockTable, int]:
    """A table of (length, kept, param) blocks, `gap` elements before each and at the end; the flat tensor's length."""
    starts, heads, bodies = [], [], []
    start, nbytes = gap, 0
    for length, kept, _ in blocks:
        starts.append(start)
        heads.append(nbytes)
        start += length + gap
        nbytes += round_up(2 * kept, 4) if method == Method.TOPK else 4
    nbytes = round_up(nbytes, ALIGN_NBYTES)
    for length, kept, _ in blocks:
        bodies.append(nbytes)
        nbytes += round_up(body_nbytes(method, length, kept), ALIGN_NBYTES)
    rows = [
        (at, length, head, body, 7 * number, param, kept if method == Method.TOPK else 0)
        for number, (at, head, body, (length, kept, param)) in enumerate(zip(starts, heads, bodies, blocks, strict=True))
    ]
    return BlockTable(torch.tensor(rows, dtype=torch.int32), nbytes), start


def body_nbytes(method: Method, length: int, kept: int) -> int:
    """Bytes that carry something."""
    if method == Method.TOPK:
        return 2 * kept
    return {Method.INT8: length, Method.INT4: (length + 31) // 32 * 16, Method.SIGN: (length + 7) // 8}[method]


def round_up(nbytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return (nbytes + unit - 1) // unit * unit
