"""Gradients that have no bucket: sparse ones, and those of parameters that were just unfrozen.

They travel when the header is in, since only then do all ranks know of them.
"""

from __future__ import annotations

import torch

from gradsync.agreement.header import Headers, Mark
from gradsync.engine.bucket import GradEntry, Layout
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import zeros
from gradsync.exchange.sparse import average_sparse
from gradsync.transport.lane import Lane


def average_unbucketed(
    lane: Lane,
    exact: ExactSum,
    entries: list[GradEntry],
    headers: Headers,
    marks: bytearray,
    scale: float,
    factor: float,
) -> None:
    """Average them now: each rank brings `scale` times its gradient, the sum is multiplied by `factor`."""
    sparse = [entry for entry in entries if entry.sparse and not _dense_somewhere(entry, headers)]
    if sparse:
        grads = [_sparse_grad(entry.param) for entry in sparse]
        averaged = average_sparse(lane, grads, [entry.name for entry in sparse], scale)
        for entry, grad in zip(sparse, averaged, strict=True):
            entry.param.grad = grad * factor if factor != 1.0 else grad
    dense = [entry for entry in entries if entry not in sparse]
    if dense:
        layout = Layout(dense, None, {entry.index for entry in dense})
        layout.place(zeros)
        for bucket in layout.buckets:
            bucket.complete(marks, scale)
            lane.wait(exact.launch(bucket.flat))
            bucket.hand_out(None, factor)
        for entry in dense:
            entry.move_out()


def _dense_somewhere(entry: GradEntry, headers: Headers) -> bool:
    """Return whether a rank has a dense gradient for it: then all bring a dense one."""
    return bool(headers.marks[entry.index] & Mark.DENSE)


def _sparse_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """The gradient, or an empty sparse one."""
    if param.grad is not None:
        return param.grad if param.grad.is_sparse else param.grad.to_sparse(1)
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    values = param.new_empty(0, *param.shape[1:])
    return torch.sparse_coo_tensor(indices, values, param.shape, device=param.device, check_invariants=False)
