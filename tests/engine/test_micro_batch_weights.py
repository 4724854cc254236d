"""Weights of micro-batches: the mean over all of them and all ranks is Σ w·g / Σ w, computed by hand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from yardstick import assert_replicas_equal

EVEN = [[3.0, 5.0, 2.0, 7.0], [4.0, 1.0, 6.0, 8.0]]  # by rank: the tokens of each micro-batch
TABLES = {
    "uneven tokens": EVEN,
    "equal": [[3.0] * 4, [3.0] * 4],
    "far apart": [[8192.0, 1.0, 4096.0, 2.0], [1.0, 8192.0, 3.0, 16384.0]],
    "nothing in the end": [[2.0, 3.0, 4.0, 0.0], [1.0, 0.0, 0.0, 5.0]],
    "nothing in the beginning": [[0.0, 0.0, 3.0, 1.0], [0.0, 6.0, 0.0, 0.0]],
    "one rank has none": [[0.0] * 4, EVEN[1]],
}


def _gradient(rank: int, step: int, number: int) -> float:
    return float(10 * rank + 3 * number - 7 * step + 1)


def _mean(tables: list[list[float]], step: int, numbers: range) -> float:
    """By hand; a fixed order makes it exact enough."""
    pairs = [(table[n], _gradient(rank, step, n)) for rank, table in enumerate(tables) for n in numbers]
    return math.fsum(w * g for w, g in pairs) / math.fsum(w for w, _ in pairs)


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """One large parameter that leaves alone, small ones, and one that only every other micro-batch uses."""
    model = nn.Module()
    model.large = nn.Parameter(torch.zeros(20000, dtype=dtype))
    model.small = nn.Parameter(torch.zeros(3, dtype=dtype))
    model.forward = lambda g: g * (model.large.sum() + model.small.sum())  # type: ignore[method-assign, assignment]
    return model


def weighted(tables: list[list[float]], kind: str, plan: gs.Plan, dtype: torch.dtype, nan: bool) -> list[float]:
    """`.grad` after three steps of four micro-batches."""
    model = _model(dtype)
    sync = gs.attach(model, None, plan, guard=gs.Guard(nonfinite="raise"))
    rank, values = dist.get_rank(), []
    for step in range(3):
        for number, weight in enumerate(tables[rank]):
            sync.set_batch_weight(weight)
            by_hand = kind == "no_sync" and number < 3
            with sync.no_sync() if by_hand else contextlib.nullcontext():
                g = _gradient(rank, step, number)
                model(torch.tensor(math.nan if nan and weight == 0 else g, dtype=dtype)).backward()
        assert model.large.grad is not None
        assert model.large.grad.eq(model.large.grad[0]).all()
        values += [model.large.grad[0].item(), model.small.grad[-1].item()]
        model.zero_grad()
    sync.detach()
    return values


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", ["accumulate", "no_sync"])
@pytest.mark.parametrize("plan", [gs.Plan(bucket_bytes=1024), gs.Plan(overlap="none")], ids=["overlap", "none"])
def test_the_mean_over_micro_batches_is_weighted(table: str, kind: str, plan: gs.Plan, run: Callable[..., Any]) -> None:
    plan = gs.Plan(
        bucket_bytes=plan.bucket_bytes, overlap=plan.overlap, pace=gs.accumulate(4 if kind != "no_sync" else 1)
    )
    expected = [_mean(TABLES[table], step, range(4)) for step in range(3) for _ in range(2)]
    nan = "nothing" in table or "none" in table
    for values in run(weighted, TABLES[table], kind, plan, torch.float32, nan):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_so_it_is_in_half_types(run: Callable[..., Any]) -> None:
    plan = gs.Plan(pace=gs.accumulate(4))
    table = [[8192.0, 64.0, 4096.0, 2.0], [1024.0, 8192.0, 3.0, 24576.0]]  # w·g would overflow
    expected = [_mean(table, step, range(4)) for step in range(3) for _ in range(2)]
    for values in run(weighted, table, "accumulate", plan, torch.float16, False):
        assert values == pytest.approx(expected, rel=1e-2)


def once_or_often(often: bool) -> list[torch.Tensor]:
    """The same weight for every micro-batch, said once or each time; with AdamW and clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(3), bucket_bytes=1024))
    rank = dist.get_rank()
    for number in range(9):
        if often or number % 3 == 0:
            sync.set_batch_weight(3.0 + rank)
        model(torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * rank + number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_replicas_equal(model)
    sync.detach()
    return [p.detach().clone() for p in model.parameters()]


def test_a_weight_said_once_is_that_of_the_whole_window(run: Callable[..., Any]) -> None:
    for once, often in zip(run(once_or_often, False), run(once_or_often, True), strict=True):
        assert all(map(torch.equal, once, often))


def uneven_and_interrupted(stop: int) -> float:
    """Windows of three under join(), the last ones short; a state is taken after `stop` backwards and loaded anew."""
    batches, rank = [[4.0, 1.0, 2.0, 3.0, 5.0], [6.0, 2.0]], dist.get_rank()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = gs.Plan(pace=gs.accumulate(3), bucket_bytes=1024)
    sync = gs.attach(model, optimizer, plan)
    for number, weight in enumerate(batches[rank][:1] if stop else []):
        sync.set_batch_weight(weight)
        model(torch.tensor(_gradient(rank, 0, number))).backward()
        state = sync.state_dict()
        sync.detach()
        model.zero_grad()
        sync = gs.attach(model, optimizer, plan)
        sync.load_state_dict(state)
    with sync.join():
        for number, weight in list(enumerate(batches[rank]))[stop:]:
            sync.set_batch_weight(weight)
            model(torch.tensor(_gradient(rank, 0, number))).backward()
            optimizer.step()
            optimizer.zero_grad()
        while sync.drain():
            optimizer.step()
            optimizer.zero_grad()
    sync.detach()
    return model.large[0].item()


@pytest.mark.parametrize("stop", [0, 1])
def test_windows_of_unequal_weights_join_and_resume(stop: int, run: Callable[..., Any]) -> None:
    first = [(4.0, 1.0), (1.0, 4.0), (2.0, 7.0), (6.0, 11.0), (2.0, 14.0)]  # weight, gradient: the first windows
    second = [(3.0, 10.0), (5.0, 13.0)]
    expected = -sum(sum(w * g for w, g in pairs) / sum(w for w, _ in pairs) for pairs in (first, second))
    for value in run(uneven_and_interrupted, stop):
        assert value == pytest.approx(expected, rel=1e-5)


def weigh_between() -> list[float]:
    """torch.autograd.grad between, a micro-batch that touches nothing, and weights in the midst of a micro-batch."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(2, backwards=2)))
    sync.set_batch_weight(9.0)
    torch.autograd.grad(model(torch.tensor(5.0)), model.small)
    sync.set_batch_weight(2.0)
    model(torch.tensor(3.0)).backward()
    with pytest.raises(gs.GradSyncError, match="after the micro-batch's first backward"):
        sync.set_batch_weight(1.0)
    model(torch.tensor(4.0)).backward()
    optimizer.step()
    sync.set_batch_weight(8.0)
    sync.set_batch_weight(3.0)  # the last word counts
    (torch.ones(1, requires_grad=True) * 2).sum().backward()  # touches no parameter: counts as zero
    optimizer.step()
    sync.detach()
    return [model.large[0].item()]


def test_weights_go_with_everything_that_counts_backwards(run: Callable[..., Any]) -> None:
    for values in run(weigh_between):
        assert values == pytest.approx([-(2.0 * 7.0) / 5.0])


def weigh_nothing_first(weights: tuple[float, float]) -> float:
    """The first micro-batch goes through the model, but through no parameter of it; two ranks do different ones."""
    weight = nn.Parameter(torch.zeros(()))
    model = nn.Module()
    model.weight = weight
    model.forward = lambda x, uses: x * weight if uses else 2 * x  # type: ignore[method-assign, assignment]
    optimizer = torch.optim.SGD([weight], lr=0.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(2)))
    for number in range(2):
        on_rank_1 = dist.get_rank() == 1
        sync.set_batch_weight(weights[number] if on_rank_1 else 1.0)
        x = torch.full((), 4.0 if on_rank_1 else 2.0, requires_grad=True)
        model(x, uses=number == 1 or not on_rank_1).backward()
        if number == 0:
            optimizer.step()
    sync.detach()
    assert weight.grad is not None
    return weight.grad.item()


@pytest.mark.parametrize("weights", [(300.0, 2.0), (5.0, 0.0), (0.0, 3.0)])
def test_a_micro_batch_without_gradients_gives_its_weight_to_no_other(
    weights: tuple[float, float], run: Callable[..., Any]
) -> None:
    mean = (1 * 2.0 + 1 * 2.0 + weights[1] * 4.0) / (1 + 1 + sum(weights))
    assert run(weigh_nothing_first, weights) == pytest.approx([mean] * 2)
