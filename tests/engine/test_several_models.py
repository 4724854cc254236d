"""Several attached models in one backward, which ranks call in any order, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from in_a_tree import in_a_tree

STEPS = 4
Models = list[nn.Module]
Optimizers = list[torch.optim.Optimizer]
Order = tuple[int, ...]
Step = Callable[[Models, Optimizers, str, int, Order], None]
Run = Callable[..., list[Any]]


def make(kind: str, number: int) -> nn.Module:
    torch.manual_seed(number)
    if kind == "sparse":
        return nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4 + number))
    return nn.Sequential(nn.Linear(8, 12 + number), nn.BatchNorm1d(12 + number), nn.Linear(12 + number, 3))


def batch(kind: str, rank: int, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    if kind == "sparse":
        return torch.randint(16, (4,), generator=generator)
    return torch.randn(4, 8, generator=generator)


def step_together(models: Models, optimizers: Optimizers, kind: str, step: int, order: Order) -> None:
    """One backward for those that `order` names, called one after the other in that order."""
    loss = torch.zeros((), requires_grad=True)
    for number in order:
        loss = loss + models[number](batch(kind, dist.get_rank(), step, number)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def step_apart(models: Models, optimizers: Optimizers, kind: str, step: int, order: Order) -> None:
    """A backward and a step for each, one after the other in the order of attaching."""
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        if number in order:
            model(batch(kind, dist.get_rank(), step, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train(kind: str, plan: gs.Plan, orders: list[Order], thaws: bool, take: Step) -> list[torch.Tensor]:
    """The parameters after some steps; the k-th of `orders` is what rank k calls in every step."""
    rank = dist.get_rank()
    models = [make(kind, number) for number in range(1 + max(max(order) for order in orders))]
    optimizers: Optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    guard = gs.Guard(timeout=20)
    syncs = [gs.attach(*pair, plan, guard=guard) for pair in zip(models, optimizers, strict=True)]
    for step in range(STEPS):
        if thaws and step in (1, 3):  # all ranks lay out their buckets anew
            for model in models:
                list(model.parameters())[-1].requires_grad_(step == 3)
        take(models, optimizers, kind, step, orders[rank])
    for sync, optimizer in zip(syncs, optimizers, strict=True):
        while sync.drain():
            optimizer.step()
            optimizer.zero_grad()
    for sync in syncs:
        sync.detach()
    return [param.detach() for model in models for param in model.parameters()]


def check(kind: str, plan: gs.Plan, orders: list[Order], thaws: bool = False) -> None:
    """The same bits as when every model has backwards of its own."""
    together = train(kind, plan, orders, thaws, step_together)
    for ours, theirs in zip(together, train(kind, plan, orders, thaws, step_apart), strict=True):
        assert torch.equal(ours, theirs)
        first = ours.clone()
        dist.broadcast(first, 0)
        assert torch.equal(ours, first)


TWO = [list(pair) for pair in itertools.product(itertools.permutations(range(2)), repeat=2)]
THREE = [[(0, 1, 2), order] for order in itertools.permutations(range(3))]
MISSING = [[(0, 1), (0,)], [(0, 1), (1,)], [(1, 0), (0,)], [(1, 0), (1,)], [(2, 0, 1), (1,)]]


@pytest.mark.parametrize("orders", TWO + THREE, ids=str)
def test_ranks_may_call_the_models_of_one_backward_in_any_order(orders: list[Order], run: Run) -> None:
    run(check, "dense", gs.Plan(bucket_bytes=1024), orders)


def check_replicas(orders: list[Order]) -> None:
    """The same weights on all ranks, and, up to the order of sums, those of backwards of their own."""
    together = train("dense", gs.Plan(bucket_bytes=1024), orders, False, step_together)
    for ours, theirs in zip(together, train("dense", gs.Plan(), orders, False, step_apart), strict=True):
        torch.testing.assert_close(ours, theirs)
        first = ours.clone()
        dist.broadcast(first, 0)
        assert torch.equal(ours, first)


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd"])
@pytest.mark.parametrize("orders", [[(0, 1), (1, 0), (1, 0), (0, 1)], [(0, 1), (1, 0), (0,), (0, 1)]], ids=str)
def test_so_they_may_where_they_agree_by_a_tree(hosts: str, orders: list[Order], run: Run) -> None:
    run(in_a_tree, check_replicas, hosts, orders, ranks=4)


@pytest.mark.parametrize("orders", MISSING, ids=str)
def test_a_model_may_be_missing_in_one_ranks_loss(orders: list[Order], run: Run) -> None:
    run(check, "dense", gs.Plan(bucket_bytes=1024), orders)


@pytest.mark.parametrize("orders", [*TWO[1:3], *MISSING[:2], THREE[3]], ids=str)
@pytest.mark.parametrize("kind", ["sparse", "thawed"])
def test_so_they_may_where_the_buckets_change_or_gradients_are_sparse(kind: str, orders: list[Order], run: Run) -> None:
    run(check, kind, gs.Plan(bucket_bytes=1024), orders, kind == "thawed")


PLANS = {
    "int8": gs.Plan(bucket_bytes=1024, compress=gs.int8()),
    "powersgd": gs.Plan(bucket_bytes=1024, compress=gs.powersgd(1)),
    "ring": gs.Plan(bucket_bytes=1024, algorithm=gs.ring()),
    "not overlapped": gs.Plan(bucket_bytes=1024, overlap="none"),
    "accumulate": gs.Plan(pace=gs.accumulate(2)),
    "delayed": gs.Plan(pace=gs.delayed(1)),
    "delayed, compressed": gs.Plan(pace=gs.delayed(2), compress=gs.int8()),
    "local_sgd": gs.Plan(pace=gs.local_sgd(2)),
    "diloco": gs.Plan(pace=gs.diloco(2)),
}


@pytest.mark.parametrize("orders", [*TWO[1:3], *MISSING[:2], THREE[3]], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_so_they_may_under_every_plan(plan: str, orders: list[Order], run: Run) -> None:
    run(check, "dense", PLANS[plan], orders)


def one_raises(order: Order) -> tuple[bool, list[bool]]:
    """A NaN that one model's guard raises does not keep the other from its average."""
    models = [make("dense", number) for number in range(2)]
    guards = [gs.Guard(timeout=20, nonfinite="raise"), gs.Guard(timeout=20)]
    syncs = [gs.attach(model, guard=guard) for model, guard in zip(models, guards, strict=True)]
    raised = False
    for step in range(2):
        factor = float("nan") if step == 1 and dist.get_rank() == 1 else 1.0
        try:
            loss = torch.zeros(())
            for number in order:
                out = models[number](batch("dense", dist.get_rank(), step, number)).square().mean()
                loss = loss + (out * factor if number == 0 else out)
            loss.backward()
        except gs.NonFinite:
            raised = True
    there = [all(param.grad is not None for param in model.parameters()) for model in models]
    for param in models[1].parameters():
        assert param.grad is not None
        first = param.grad.clone()
        dist.broadcast(first, 0)
        assert torch.equal(param.grad, first)
    for sync in syncs:
        sync.detach()
    return raised, there


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_one_model_raises_the_others_do_not_miss(order: Order, run: Run) -> None:
    assert run(one_raises, order) == [(True, [False, True])] * 2
