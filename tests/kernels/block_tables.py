"""Tables of blocks for tests (all heads, then all bodies), what is in the blocks, and both ways of coding them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from gradsync.kernels.block_kernels import ALIGN_NBYTES, BlockTable, Code, Method, Mode

LENGTHS = (1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 250, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CODES = [Code(method, 256) for method in Method] + [Code(method, 256, True) for method in (Method.INT8, Method.INT4)]


class Encoded(NamedTuple):
    payload: torch.Tensor
    residual: torch.Tensor


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
        for number, (at, head, body, (length, kept, param)) in enumerate(
            zip(starts, heads, bodies, blocks, strict=True)
        )
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


def some_blocks(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, int, int]]:
    return [(length, max(1, length // 7), 12345 * i - 9999) for i, length in enumerate(lengths)]


def random_flat(size: int, seed: int = 0, spread: int = 4) -> torch.Tensor:
    """Values of mixed sizes, some of them equal."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-spread, 2, (size,), generator=generator)
    flat[::5] = flat[::5].round()
    return flat


def encoded(
    by: ModuleType, code: Code, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, mode: Mode, key: int = 9
) -> Encoded:
    """Payload and residual that `by` makes. Bytes that nobody writes are 0xAA, here as there."""
    payload = torch.full((table.nbytes,), 0xAA, dtype=torch.uint8)
    after = residual.clone()
    by.encode(code, flat, None if mode == Mode.NONE else after, table, payload, mode, key)
    return Encoded(payload, after)


def decoded(
    by: ModuleType, code: Code, payloads: torch.Tensor, table: BlockTable, size: int, dtype: torch.dtype
) -> torch.Tensor:
    flat = torch.full((size,), 77.0, dtype=dtype)
    by.decode(code, payloads, table, flat)
    return flat


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with every NaN as the same one."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).contiguous().view(torch.uint8)
