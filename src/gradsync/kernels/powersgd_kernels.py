"""PowerSGD's passes over a batch of matrices of one shape: on a GPU in Triton, on the CPU in C, else in torch.

    residual += grad ──▶ p = residual · q ──▶ (all-reduce p) ──▶ orthogonalize p
    q = residualᵀ · p ──▶ (all-reduce q) ──▶ grad = p · q_sumᵀ,  residual −= p · q_ownᵀ

    grad [B, m, n] (fp32, bf16 or fp16), residual [B, m, n], p [B, m, r], q [B, n, r] (fp32), all contiguous

Everything is computed in fp32, never in TF32. On the CPU a matrix gives the same bits in whatever batch it is.
Triton adds in another order: the two agree as fp32 sums of that length do (relative error about 1e-5), and each gives
the same bits every time.

Note [Spoiled matrices]
    A NaN or an infinity in a gradient is in p afterwards, on every rank once p was added up. Then nothing of that
    matrix can be restored: its gradient becomes NaN, for the user to see, and its residual zero, so that the next step
    is clean. The decision is made on the device; the host never waits for it.

Note [Same bits]
    What torch makes of a product may depend on how many there are in a batch, and on where operands lie in memory.
    So without the library each is a call of its own, and its operands begin where every matrix in a bucket begins:
    on a border of 64 bytes, or a copy does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType

import torch

from gradsync.kernels.library import load

# What a column keeps of its length, after those before it were taken out of it, if it is but their rounding errors.
VANISHED = 2.0**-18
_BORDER_NBYTES = 64


def project(grad: torch.Tensor, residual: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Add the gradient to the residual, in place, and return their sum's image: p = residual · q.

    >>> residual = torch.ones(1, 2, 3)
    >>> project(torch.ones(1, 2, 3), residual, torch.ones(1, 3, 1)).flatten().tolist(), residual[0, 0].tolist()
    ([6.0, 6.0], [2.0, 2.0, 2.0])
    """
    if grad.is_cuda:
        return _triton().project(grad, residual, q)
    if (library := load()) is None:
        residual += grad
        return _products(residual, q)
    p = torch.empty(len(grad), grad.shape[1], q.shape[2], dtype=torch.float32, device="cpu")
    for each in zip(grad.float(), residual, q, p, strict=True):
        _call(library.gradsync_project, each, *grad.shape[1:], q.shape[2])
    return p


def project_back(residual: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The image of p: q = residualᵀ · p.

    >>> project_back(torch.ones(1, 2, 3), torch.ones(1, 2, 1)).flatten().tolist()
    [2.0, 2.0, 2.0]
    """
    if residual.is_cuda:
        return _triton().project_back(residual, p)
    if (library := load()) is None:
        return _products(p.mT, residual).mT.contiguous()  # ten times as fast as residualᵀ · p
    q = torch.empty(len(p), residual.shape[2], p.shape[2], dtype=torch.float32, device="cpu")
    for each in zip(residual, p, q, strict=True):
        _call(library.gradsync_project_back, each, *residual.shape[1:], p.shape[2])
    return q


def restore(
    grad: torch.Tensor, residual: torch.Tensor, p: torch.Tensor, q_own: torch.Tensor, q_sum: torch.Tensor
) -> None:
    """Put p · q_sumᵀ into the gradient and take p · q_ownᵀ out of the residual; see [Spoiled matrices].

    >>> grad, residual = torch.empty(1, 1, 2), torch.ones(1, 1, 2)
    >>> restore(grad, residual, torch.ones(1, 1, 1), torch.ones(1, 2, 1), torch.full((1, 2, 1), 5.0))
    >>> grad.flatten().tolist(), residual.flatten().tolist()
    ([5.0, 5.0], [0.0, 0.0])
    """
    if grad.is_cuda:
        _triton().restore(grad, residual, p, q_own, q_sum)
        return
    if (library := load()) is None:
        grad.copy_(_products(p, q_sum.mT))
        residual -= _products(p, q_own.mT)
    else:
        wide = grad if grad.dtype == torch.float32 else torch.empty_like(grad, dtype=torch.float32)
        for each in zip(wide, residual, p, q_own, q_sum, strict=True):
            _call(library.gradsync_restore, each, *grad.shape[1:], p.shape[2])
        grad.copy_(wide)
    for i in (~p.isfinite().flatten(1).all(1)).nonzero().flatten().tolist():
        grad[i], residual[i] = torch.nan, 0.0


def orthogonalize(p: torch.Tensor) -> None:
    """Make the columns of each matrix orthonormal, in place: modified Gram-Schmidt.

    A column that is a combination of those before it becomes zeros; what is NaN stays NaN.

    >>> p = torch.tensor([[[3.0, 6.0, 1.0], [4.0, 8.0, 0.0]]])
    >>> orthogonalize(p)
    >>> [[round(x, 4) for x in row] for row in p[0].tolist()]
    [[0.6, 0.0, 0.8], [0.8, 0.0, -0.6]]
    """
    if p.is_cuda:
        _triton().orthogonalize(p, VANISHED)
        return
    columns = p.mT.contiguous()
    whole = _length(columns)
    for i in range(p.shape[2]):
        column, rest = columns[:, i : i + 1], columns[:, i + 1 :]
        length = _length(column)
        vanished = length <= VANISHED * whole[:, i : i + 1]
        column.div_(length).masked_fill_(vanished, 0)
        rest -= (rest * column).sum(-1, keepdim=True) * column
    p.copy_(columns.mT)


def _call(function: Callable[..., int], tensors: Iterable[torch.Tensor], *sizes: int) -> None:
    pointers = []
    for tensor in tensors:
        assert tensor.is_contiguous(), "the library reads a matrix row by row"
        pointers.append(tensor.data_ptr())
    if not function(*pointers, *sizes):
        raise MemoryError("no memory for the factors of a matrix")


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The products of pairs of matrices, each made of operands that begin on a border: see [Same bits]."""
    return torch.stack([torch.mm(_on_border(a), _on_border(b)) for a, b in zip(left, right, strict=True)])


def _on_border(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.data_ptr() % _BORDER_NBYTES == 0 else matrix.clone()


def _length(columns: torch.Tensor) -> torch.Tensor:
    """Each column's length; NaN where not finite: a column divided by infinity would pass for one that vanished."""
    length = (columns * columns).sum(-1, keepdim=True).sqrt()
    return length.masked_fill(length.isinf(), torch.nan)


def _triton() -> ModuleType:
    """The module for GPUs, imported late: Triton comes with the torch of a GPU only."""
    return import_module("gradsync.kernels.powersgd_triton")
