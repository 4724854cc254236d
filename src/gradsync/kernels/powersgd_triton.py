# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment"
"""PowerSGD's passes on a GPU: what `powersgd_kernels` says, each matrix read and written once per pass.

    project        12 bytes an element   read grad and residual, write residual; sums of p in registers
    project_back    4                    read residual; sums over parts of 128 rows, then over the parts
    restore        12                    read residual, write residual and grad

A program is one warp with a tile [ROWS, COLUMNS] and a tuple of as many sums as the rank: multiplied in fp32, without
tensor cores, which would round to TF32. `project` needs all of q for every tile and so takes it with its long side
together in memory (qᵀ): a read has 16 bytes. The others hold their part of it while they move down the rows.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

_COLUMNS = 128  # a warp's reads of 16 bytes, side by side
_SUMS = 16  # of a tile of `project`: rank · rows; with 4 columns each they are half of a thread's registers
_ROWS_DOWN = 8  # of a tile that moves down its columns
_PART = 128  # rows of a sum of `project_back`
_STRIP = 64  # rows that a program of `restore` moves down
_HELD = 4096  # elements of p in the registers of a program of `orthogonalize`


def project(grad: torch.Tensor, residual: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Do what `powersgd_kernels.project` does, on a GPU."""
    batch, m, n = grad.shape
    p = q.new_empty(batch, m, q.shape[2])
    tile = _tile(q.shape[2], max(_SUMS // triton.next_power_of_2(q.shape[2]), 1))
    grid = (triton.cdiv(m, tile["ROWS"]), batch)
    _project_kernel[grid](grad, residual, q.mT.contiguous(), p, m, n, **tile)
    return p


def project_back(residual: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Do what `powersgd_kernels.project_back` does, on a GPU. Parts are added in one order, whichever is done first."""
    batch, m, n = residual.shape
    num_parts = triton.cdiv(m, _PART)
    parts = p.new_empty(num_parts, batch, p.shape[2], n)
    grid = (triton.cdiv(n, _COLUMNS), num_parts, batch)
    _project_back_kernel[grid](residual, p, parts, m, n, PART=_PART, **_tile(p.shape[2], _ROWS_DOWN))
    q = p.new_empty(batch, n, p.shape[2])
    torch.sum(parts, 0, out=q.mT)
    return q


def restore(
    grad: torch.Tensor, residual: torch.Tensor, p: torch.Tensor, q_own: torch.Tensor, q_sum: torch.Tensor
) -> None:
    """Do what `powersgd_kernels.restore` does, on a GPU."""
    batch, m, n = grad.shape
    largest = torch.linalg.vector_norm(p, torch.inf, dim=(1, 2))  # NaN if there is one
    grid = (triton.cdiv(n, _COLUMNS), triton.cdiv(m, _STRIP), batch)
    _restore_kernel[grid](grad, residual, p, q_own, q_sum, largest, m, n, PART=_STRIP, **_tile(p.shape[2], _ROWS_DOWN))


def orthogonalize(p: torch.Tensor, vanished: float) -> None:
    """Do what `powersgd_kernels.orthogonalize` does, on a GPU. A program has a matrix."""
    batch, m, rank = p.shape
    padded = triton.next_power_of_2(rank)
    rows = max(_HELD // padded, 16)
    _orthogonalize_kernel[(batch,)](p, m, vanished, RANK=rank, PADDED=padded, ROWS=rows, num_warps=8)


def _tile(rank: int, rows: int) -> dict[str, int]:
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
        sums = _added(sums, e, _load(q + column, n, column < n, RANK), False, RANK)
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
    sums = _zeros(RANK, 1, COLUMNS)
    for first in range(0, PART, ROWS):
        row = part * PART + first + tl.arange(0, ROWS)[:, None]
        e = tl.load(residual + (row * n + column), (row < m) & (column < n), 0.0)
        factors = _load(p + row * RANK, 1, row < m, RANK)
        sums = _added(sums, e, factors, True, RANK)
    parts += (part * tl.num_programs(2) + matrix) * RANK * n
    for k in tl.static_range(RANK):
        tl.store(parts + k * n + column, sums[k], column < n)


@triton.jit
def _restore_kernel(
    grad,
    residual,
    p,
    q_own,
    q_sum,
    largest,
    m,
    n,
    PART: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of a matrix, down one part."""
    matrix, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    grad, residual, p = grad + matrix * m * n, residual + matrix * m * n, p + matrix * m * RANK
    is_sound = tl.load(largest + matrix) < float("inf")  # see [Spoiled matrices]
    own = _load(q_own + (matrix * n + column) * RANK, 1, column < n, RANK)
    total = _load(q_sum + (matrix * n + column) * RANK, 1, column < n, RANK)
    for first in range(0, PART, ROWS):
        row = part * PART + first + tl.arange(0, ROWS)[:, None]
        where, inside = row * n + column, (row < m) & (column < n)
        e, g = tl.load(residual + where, inside, 0.0), tl.zeros((ROWS, COLUMNS), tl.float32)
        factors = _load(p + row * RANK, 1, row < m, RANK)
        for k in tl.static_range(RANK):
            g += factors[k] * total[k]
            e -= factors[k] * own[k]
        tl.store(grad + where, tl.where(is_sound, g, float("nan")), inside)
        tl.store(residual + where, tl.where(is_sound, e, 0.0), inside)


@triton.jit
def _zeros(RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(RANK):
        sums = sums + (tl.zeros((ROWS, COLUMNS), tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def _load(factors, stride, within, RANK: tl.constexpr):
    """RANK rows or columns of a factor, `stride` elements apart."""
    tiles = ()
    for k in tl.static_range(RANK):
        tiles = tiles + (tl.load(factors + k * stride, within, 0.0),)  # noqa: RUF005
    return tiles


@triton.jit
def _added(sums, e, factors, DOWN: tl.constexpr, RANK: tl.constexpr):
    """A tile times each factor, added to its sums; first down its columns, which a thread does alone."""
    more = ()
    for k in tl.static_range(RANK):
        products = e * factors[k]
        more = more + (sums[k] + (tl.sum(products, 0, keep_dims=True) if DOWN else products),)  # noqa: RUF005
    return more


@triton.jit(do_not_specialize=["vanished"])
def _orthogonalize_kernel(p, m, vanished, RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """The columns in turn: measure it and its share in each one after it, then take it out of them.

    A pass of measuring and a pass of writing for each, between which threads wait for each other.
    """
    p += tl.program_id(0).to(tl.int64) * m * RANK
    k = tl.arange(0, PADDED)[None, :]
    whole = tl.sqrt_rn(_products(p, k, 0, m, RANK, PADDED, ROWS, True))
    for i in range(RANK):
        products = _products(p, k, i, m, RANK, PADDED, ROWS, False)
        length = tl.sqrt_rn(_pick(products, k, i))
        length = tl.where(length == float("inf"), float("nan"), length)
        inverse = tl.where(length <= vanished * _pick(whole, k, i), 0.0, 1.0 / length)
        tl.debug_barrier()
        for first in range(0, m, ROWS):
            row = first + tl.arange(0, ROWS)[:, None]
            tile = tl.load(p + (row * RANK + k), (row < m) & (k < RANK), 0.0)
            unit = _pick(tile, k, i) * inverse
            left = tile - tl.where(k > i, products * inverse, 0.0) * unit
            tl.store(p + (row * RANK + k), tl.where(k == i, unit, left), (row < m) & (k < RANK))
        tl.debug_barrier()


@triton.jit
def _products(p, k, i, m, RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr):
    """Each column times column i, or times itself."""
    sums = tl.zeros((ROWS, PADDED), tl.float32)
    for first in range(0, m, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        tile = tl.load(p + (row * RANK + k), (row < m) & (k < RANK), 0.0)
        sums += tile * (tile if OWN else _pick(tile, k, i))
    return tl.sum(sums, 0, keep_dims=True)


@triton.jit
def _pick(tile, k, i):
    """Column i."""
    return tl.sum(tl.where(k == i, tile, 0.0), 1, keep_dims=True)
