# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment"
"""PowerSGD's passes on a GPU: what `low_rank` says, each matrix read and written once per pass.

    project        12 bytes an element   read grad and residual, write residual; sums of p in registers
    project_back    4                    read residual; sums over parts of 256 rows, then over the parts
    restore        12                    read residual, write residual and grad

A program is one warp with a tile [ROWS, COLUMNS] and as many sums of that shape as the rank, in a tuple: multiplied in
fp32, without tensor cores, which would round to TF32. Small factors come with their long side together in memory (qᵀ),
so that a read has 16 bytes.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

_COLUMNS = 128  # a warp's reads of 16 bytes, side by side
_SUMS = 16  # of a tile: rank · ROWS; with 4 columns each they are half of a thread's registers
_MAX_ROWS = 8
_PART = 256  # rows
_HELD = 4096  # elements of p in the registers of a program of `orthogonalize`


def project(grad: torch.Tensor, residual: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """See `low_rank.project`."""
    batch, m, n = grad.shape
    p = q.new_empty(batch, m, q.shape[2])
    tile = _tile(q.shape[2])
    grid = (triton.cdiv(m, tile["ROWS"]), batch)
    _project_kernel[grid](grad, residual, q.mT.contiguous(), p, m, n, **tile)
    return p


def project_back(residual: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """See `low_rank.project_back`. Parts are added in one order, whichever is done first."""
    batch, m, n = residual.shape
    num_parts = triton.cdiv(m, _PART)
    parts = p.new_empty(num_parts, batch, p.shape[2], n)
    grid = (triton.cdiv(n, _COLUMNS), num_parts, batch)
    _project_back_kernel[grid](residual, p, parts, m, n, PART=_PART, **_tile(p.shape[2]))
    return parts.sum(0).mT.contiguous()


def restore(
    grad: torch.Tensor, residual: torch.Tensor, p: torch.Tensor, q_own: torch.Tensor, q_sum: torch.Tensor
) -> None:
    """See `low_rank.restore`."""
    batch, m, n = grad.shape
    tile = _tile(p.shape[2]) | {"ROWS": _MAX_ROWS}
    sound = p.isfinite().flatten(1).all(1)
    grid = (triton.cdiv(n, _COLUMNS), triton.cdiv(m, _MAX_ROWS), batch)
    _restore_kernel[grid](grad, residual, p, q_own.mT.contiguous(), q_sum.mT.contiguous(), sound, m, n, **tile)


def orthogonalize(p: torch.Tensor, vanished: float) -> None:
    """See `low_rank.orthogonalize`. A program has a matrix."""
    batch, m, rank = p.shape
    columns = p.mT.contiguous()
    padded = triton.next_power_of_2(rank)
    tile = max(_HELD // padded, 16)
    _orthogonalize_kernel[(batch,)](columns, m, rank, vanished, RANK=padded, COLUMNS=tile, num_warps=8)
    p.copy_(columns.mT)


def _tile(rank: int) -> dict[str, int]:
    rows = min(max(_SUMS // triton.next_power_of_2(rank), 1), _MAX_ROWS)
    return {"RANK": rank, "ROWS": rows, "COLUMNS": _COLUMNS, "num_warps": 1}


@triton.jit
def _project_kernel(grad, residual, q, p, m, n, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS rows of a matrix, from left to right."""
    matrix = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    grad, residual, q = grad + matrix * m * n, residual + matrix * m * n, q + matrix * n * RANK
    sums = _zeros(RANK, ROWS, COLUMNS)
    for first in range(0, n, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = (row < m) & (column < n)
        e = tl.load(residual + (row * n + column), inside, 0.0)
        e += tl.load(grad + (row * n + column), inside, 0.0).to(tl.float32)
        tl.store(residual + (row * n + column), e, inside)
        sums = _added(sums, e, q + column, n, column < n, RANK)
    for k in tl.static_range(RANK):
        tl.store(p + (matrix * m + row) * RANK + k, tl.sum(sums[k], 1, keep_dims=True), row < m)


@triton.jit
def _project_back_kernel(
    residual, p, parts, m, n, PART: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """COLUMNS columns of a matrix, down one part."""
    matrix, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    residual, p = residual + matrix * m * n, p + matrix * m * RANK
    sums = _zeros(RANK, ROWS, COLUMNS)
    for first in range(0, PART, ROWS):
        row = part * PART + first + tl.arange(0, ROWS)[:, None]
        e = tl.load(residual + (row * n + column), (row < m) & (column < n), 0.0)
        sums = _added(sums, e, p + row * RANK, 1, row < m, RANK)
    parts += (part * tl.num_programs(2) + matrix) * RANK * n
    for k in tl.static_range(RANK):
        tl.store(parts + k * n + column, tl.sum(sums[k], 0, keep_dims=True), column < n)


@triton.jit
def _restore_kernel(
    grad, residual, p, q_own, q_sum, sound, m, n, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One tile of a matrix."""
    matrix = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    where, inside = matrix * m * n + (row * n + column), (row < m) & (column < n)
    e = tl.load(residual + where, inside, 0.0)
    g = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.static_range(RANK):
        factor = tl.load(p + (matrix * m + row) * RANK + k, row < m, 0.0)
        at = (matrix * RANK + k) * n + column
        g += factor * tl.load(q_sum + at, column < n, 0.0)
        e -= factor * tl.load(q_own + at, column < n, 0.0)
    is_sound = tl.load(sound + matrix) != 0  # see [Spoiled matrices]
    tl.store(grad + where, tl.where(is_sound, g, float("nan")), inside)
    tl.store(residual + where, tl.where(is_sound, e, 0.0), inside)


@triton.jit
def _zeros(RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(RANK):
        sums = sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def _added(sums, e, factors, stride, within, RANK: tl.constexpr):
    """A tile times each of RANK factors, which are rows or columns `stride` elements apart, added to its sums."""
    more = ()
    for k in tl.static_range(RANK):
        more = more + (sums[k] + e * tl.load(factors + k * stride, within, 0.0),)  # noqa: RUF005
    return more


@triton.jit(do_not_specialize=["vanished"])
def _orthogonalize_kernel(p, m, rank, vanished, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows of pᵀ in turn: measure it and its part in each row below, then take it out of them.

    A pass of measuring and a pass of writing for each, between which threads wait for each other.
    """
    k = tl.arange(0, RANK)
    whole = tl.sqrt_rn(_products(p, k, 0, m, rank, RANK, COLUMNS, True))
    for i in range(rank):
        products = _products(p, k, i, m, rank, RANK, COLUMNS, False)
        length = tl.sqrt_rn(_pick(products, k, i))
        length = tl.where(length == float("inf"), float("nan"), length)
        inverse = tl.where(length <= vanished * _pick(whole, k, i), 0.0, 1.0 / length)
        tl.debug_barrier()
        for first in range(0, m, COLUMNS):
            at, inside = _place(p, tl.program_id(0).to(tl.int64), k, first + tl.arange(0, COLUMNS), rank, m)
            tile = tl.load(at, inside, 0.0)
            unit = _pick(tile, k[:, None], i)[None, :] * inverse
            left = tile - tl.where(k > i, products * inverse, 0.0)[:, None] * unit
            tl.store(at, tl.where(k[:, None] == i, unit, left), inside)
        tl.debug_barrier()


@triton.jit
def _products(p, k, i, m, rank, RANK: tl.constexpr, COLUMNS: tl.constexpr, OWN: tl.constexpr):
    """Each row times row i, or times itself."""
    sums = tl.zeros((RANK, COLUMNS), tl.float32)
    for first in range(0, m, COLUMNS):
        at, inside = _place(p, tl.program_id(0).to(tl.int64), k, first + tl.arange(0, COLUMNS), rank, m)
        tile = tl.load(at, inside, 0.0)
        sums += tile * (tile if OWN else _pick(tile, k[:, None], i)[None, :])
    return tl.sum(sums, 1)


@triton.jit
def _pick(values, k, i):
    return tl.sum(tl.where(k == i, values, 0.0), 0)


@triton.jit
def _place(matrices, matrix, row, column, num_rows, num_columns):
    """Where these rows and columns of a matrix are, and which of them there are."""
    at = matrices + matrix * num_rows * num_columns + (row[:, None] * num_columns + column[None, :])
    return at, (row[:, None] < num_rows) & (column[None, :] < num_columns)
