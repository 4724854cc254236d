"""Sparse gradients: the average is that of the dense gradients, the same on every rank, and stays sparse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.exchange.group_cache import group_cache
from gradsync.exchange.sparse import average_sparse

ROWS = 10
# What each of three ranks looks up, step after step.
LOOKUPS: dict[str, list[list[list[int]]]] = {
    "other rows on each": [[[0, 1], [2, 3], [4, 5, 6]], [[9], [8], [7]]],
    "the same rows": [[[1, 2], [1, 2], [2, 1]]] * 2,
    "duplicates": [[[1, 1, 1], [1, 2], [2, 2]], [[3, 3], [3, 3], [3, 3]]],
    "a rank without rows": [[[0, 1], [], [2]], [[], [3], []]],
    "nobody has rows": [[[], [], []], [[1], [], []]],
    "nobody has rows later": [[[1], [2], [3]], [[], [], []]],
}


class Net(nn.Module):
    """An embedding and a dense layer over the mean of what was looked up."""

    def __init__(self, table: nn.Module, width: int) -> None:
        super().__init__()
        self.table = table
        self.dense = nn.Linear(width, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.table(rows)
        return self.dense(found.sum(0) / max(1, len(rows))).square().sum()


def embedding(sparse: bool) -> Net:
    torch.manual_seed(0)
    return Net(nn.Embedding(ROWS, 3, sparse=sparse, dtype=torch.float64), 3).double()


def bag(sparse: bool) -> Net:
    """Each row is a bag of its own, so that the gradient has the same rows."""
    torch.manual_seed(0)
    model = Net(nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=sparse, dtype=torch.float64), 3).double()
    model.table.register_forward_pre_hook(lambda module, args: (args[0].unsqueeze(1),))
    return model


def gradients(model: nn.Module, steps: list[list[list[int]]]) -> list[list[torch.Tensor]]:
    """The table's and the dense layer's gradients after each step, made dense."""
    found = []
    for lookups in steps:
        model.zero_grad()
        model(torch.tensor(lookups[dist.get_rank()], dtype=torch.int64)).backward()
        grads = [p.grad for p in model.parameters()]
        found.append([torch.zeros(1) if g is None else g.to_dense().clone() for g in grads])
    return found


def attached(make: Any, sparse: bool, steps: list[list[list[int]]]) -> list[list[torch.Tensor]]:
    model = make(sparse)
    sync = gs.attach(model)
    try:
        return gradients(model, steps)
    finally:
        sync.detach()


def sparse_and_dense(make: Any, case: str) -> list[Any]:
    sparse, dense = (attached(make, flag, LOOKUPS[case]) for flag in (True, False))
    # Values travel as numbers: a shared tensor would outlive the rank that made it.
    return [[[g.tolist() for g in step] for step in way] for way in (sparse, dense)]


@pytest.mark.parametrize("case", LOOKUPS)
@pytest.mark.parametrize("make", [embedding, bag])
def test_a_sparse_average_is_the_dense_one_on_every_rank(make: Any, case: str, run: Any) -> None:
    ranks = run(sparse_and_dense, make, case, ranks=3)
    assert all(each[0] == ranks[0][0] for each in ranks), "the same bits on every rank"
    sparse, dense = ranks[0]
    for one, other in zip(sparse, dense, strict=True):
        for grad, expected in zip(one, other, strict=True):
            torch.testing.assert_close(torch.tensor(grad), torch.tensor(expected), rtol=1e-12, atol=1e-15)


def sparse_beside_ddp(case: str) -> bool:
    """Equal to DistributedDataParallel, whose gloo all-reduce knows sparse tensors."""
    ours = attached(embedding, True, LOOKUPS[case])
    theirs = gradients(DistributedDataParallel(embedding(True)), LOOKUPS[case])
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return all(torch.allclose(mine, other, rtol=1e-12, atol=1e-15) for mine, other in pairs)


@pytest.mark.parametrize("case", ["other rows on each", "the same rows", "duplicates"])
def test_a_sparse_average_is_that_of_ddp(case: str, run: Any) -> None:
    assert run(sparse_beside_ddp, case, ranks=3) == [True] * 3


class Weights(nn.Module):
    """A table of scalars whose gradient is sparse with one-dimensional values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.gather(self.weight, 0, rows, sparse_grad=True).square().sum()


def average_scalars(rows: list[list[int]]) -> list[Any]:
    model = Weights()
    sync = gs.attach(model)
    found: list[Any] = []
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor(rows[dist.get_rank()])).backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad.to_dense().tolist())
    found.append(str(model.weight.grad.layout))
    sync.detach()
    return found


def test_values_of_one_dimension_average_and_are_learned_to_be_sparse(run: Any) -> None:
    # Rank 0 uses rows 1 and 2, rank 1 rows 2 and 2: gradients are 2·w, halved by the mean.
    expected = [0.0, 1.0, 6.0, 0.0, 0.0]
    assert run(average_scalars, [[1, 2], [2, 2]]) == [[expected] * 3 + ["torch.sparse_coo"]] * 2


def form_of_the_gradient() -> tuple[str, bool, int]:
    model = embedding(True)
    sync = gs.attach(model)
    model(torch.tensor([dist.get_rank(), 5])).backward()
    grad = model.table.weight.grad
    sync.detach()
    return str(grad.layout), grad.is_coalesced(), grad._nnz()


def test_the_average_stays_sparse_with_the_rows_of_all_ranks(run: Any) -> None:
    assert run(form_of_the_gradient) == [("torch.sparse_coo", True, 3)] * 2


def train(sparse: bool) -> list[float]:
    model = embedding(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    for step in range(5):
        model(torch.tensor([step, dist.get_rank()])).backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    return model.table.weight.detach().flatten().tolist()


def test_training_with_sparse_gradients_is_training_with_dense_ones(run: Any) -> None:
    sparse, dense = run(train, True), run(train, False)
    assert sparse[0] == sparse[1]
    assert sparse[0] == pytest.approx(dense[0], rel=1e-12)


def accumulate_sparse(sparse: bool) -> tuple[list[float], list[float]]:
    """Accumulated by hand under no_sync, then summed with weights."""
    model = embedding(sparse)
    sync = gs.attach(model)
    with sync.no_sync():
        model(torch.tensor([0, dist.get_rank()])).backward()
    model(torch.tensor([1])).backward()
    first = model.table.weight.grad.to_dense().flatten().tolist()
    model.zero_grad()
    sync.set_batch_weight(1.0 + 2 * dist.get_rank())
    model(torch.tensor([2, 3 + dist.get_rank()])).backward()
    second = model.table.weight.grad.to_dense().flatten().tolist()
    sync.detach()
    return first, second


def test_accumulated_and_weighted_sparse_gradients_average_as_dense_ones(run: Any) -> None:
    sparse, dense = run(accumulate_sparse, True), run(accumulate_sparse, False)
    assert sparse[0] == sparse[1]
    for one, other in zip(sparse[0], dense[0], strict=True):
        assert one == pytest.approx(other, rel=1e-12)


# For each of three ranks: which rows it has, and by what it multiplies.
BROUGHT: dict[str, list[tuple[list[int], float]]] = {
    "a rank that weighs nothing": [([0, 1], 0.5), ([2, 2, 3], 0.0), ([1], 0.25)],
    "nobody weighs anything": [([0], 0.0), ([1], 0.0), ([2], 0.0)],
    "longer and shorter ones": [([4, 1, 1, 0], 1.0), ([], 1.0), ([1], 2.0)],
}


def brought_by(rank: int, case: str) -> list[torch.Tensor]:
    """Gradients with rows of no dimension, of one and of two; NaN where it weighs nothing."""
    rows, scale = BROUGHT[case][rank]
    found = []
    for shape in ((), (2,), (2, 3)):
        numbers = torch.arange(1.0, 1 + len(rows) * torch.Size(shape).numel()).view(len(rows), *shape)
        values = numbers if scale else numbers * torch.nan
        indices = torch.tensor([rows], dtype=torch.int64)
        found.append(torch.sparse_coo_tensor(indices, values, (5, *shape), check_invariants=True))
    return found


def average_directly(case: str) -> list[Any]:
    world = dist.group.WORLD
    assert world is not None
    cache = group_cache(world)
    cache.exact(world, torch.device("cpu"), None)
    rank = dist.get_rank()
    found = average_sparse(cache.lane, brought_by(rank, case), ["a", "b", "c"], BROUGHT[case][rank][1])
    assert all(each.is_coalesced() for each in found)
    return [(each.indices().tolist(), each.to_dense().tolist()) for each in found]


@pytest.mark.parametrize("case", BROUGHT)
def test_a_sum_of_sparse_gradients_is_that_of_the_dense_ones_and_weight_0_brings_nothing(case: str, run: Any) -> None:
    ranks = run(average_directly, case, ranks=3)
    assert ranks[1:] == ranks[:1] * 2
    weights = [scale for _, scale in BROUGHT[case]]
    rows = sorted({row for rows, scale in BROUGHT[case] if scale for row in rows})
    for number, (indices, dense) in enumerate(ranks[0]):
        scaled = [brought_by(rank, case)[number].to_dense() * scale for rank, scale in enumerate(weights) if scale]
        expected = (
            torch.stack(scaled).sum(0).tolist() if scaled else torch.zeros(5, *((), (2,), (2, 3))[number]).tolist()
        )
        assert (indices, dense) == ([rows], expected)
