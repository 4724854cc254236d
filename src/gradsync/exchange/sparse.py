"""Sparse gradients (of embeddings): sizes first, then indices and values, padded to the longest.

Only after the sizes are known everywhere do tensors of agreed size travel. Every rank adds the parts in
rank order, so all ranks end with the same bits.
"""

from __future__ import annotations

import torch

from gradsync.transport.lane import Lane


def average_sparse(lane: Lane, grads: list[torch.Tensor], names: list[str], scale: float) -> list[torch.Tensor]:
    """The sum over ranks of `scale` times each gradient; all are sparse, of agreed shapes and order."""
    parts = [(grad if scale else _nothing_of(grad)).coalesce() for grad in grads]
    mine = torch.tensor([part._nnz() for part in parts], dtype=torch.int64, device="cpu")
    counts = torch.empty(lane.groups.size, len(parts), dtype=torch.int64, device="cpu")
    lane.run(
        lambda: lane.groups.control.gather(counts, mine),
        f"the sizes of sparse gradients ({', '.join(names)})",
    )
    return [
        _sum_one(lane, part, counts[:, i].tolist(), name, scale)
        for i, (part, name) in enumerate(zip(parts, names, strict=True))
    ]


def _nothing_of(grad: torch.Tensor) -> torch.Tensor:
    """Weight 0 brings no rows at all: 0 · NaN would be NaN."""
    indices = torch.empty(grad.sparse_dim(), 0, dtype=torch.int64, device=grad.device)
    values = grad.new_empty(0, *grad.shape[grad.sparse_dim() :], layout=torch.strided)
    return torch.sparse_coo_tensor(indices, values, grad.shape, device=grad.device, check_invariants=False)


def _sum_one(lane: Lane, part: torch.Tensor, counts: list[int], name: str, scale: float) -> torch.Tensor:
    longest = max(counts)
    if longest == 0:
        return part
    indices = _gather(lane, part.indices().t(), longest, f"sparse indices of {name}")
    values = _gather(lane, part.values() * scale, longest, f"sparse values of {name}")
    return torch.sparse_coo_tensor(
        torch.cat([each[:n] for each, n in zip(indices, counts, strict=True)]).t(),
        torch.cat([each[:n] for each, n in zip(values, counts, strict=True)]),
        part.shape,
        device=part.device,
        check_invariants=False,
    ).coalesce()


def _gather(lane: Lane, mine: torch.Tensor, longest: int, what: str) -> torch.Tensor:
    """Every rank's rows, each padded to `longest`."""
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine
    gathered = mine.new_empty(lane.groups.size, longest, *mine.shape[1:])
    channel = lane.groups.data[mine.device.type]
    lane.run(lambda: channel.gather(gathered, padded), what)
    return gathered
