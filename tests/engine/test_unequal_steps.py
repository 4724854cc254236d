"""Backwards and steps of unequal number: every rank hears of it in that step, before anything is used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

import gradsync as gs
from models import mlp
from yardstick import assert_replicas_equal

PLANS = {
    "every_step": gs.Plan(),
    "none": gs.Plan(overlap="none"),
    "int8": gs.Plan(compress=gs.int8()),
    "accumulate": gs.Plan(pace=gs.accumulate(2)),
    "long windows": gs.Plan(pace=gs.accumulate(5)),
    "delayed": gs.Plan(pace=gs.delayed(1)),
}


def _backward(model: nn.Module, number: int, scaler: GradScaler | None = None) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + number))
    loss = model(x).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def train_unequally(plan: gs.Plan, kind: str, scaled: bool) -> tuple[str, int]:
    """What was raised, and in which iteration of this rank's loop."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0, enabled=scaled)
    sync = gs.attach(model, optimizer, plan, scaler=scaler, guard=gs.Guard(timeout=30))
    rank, number = dist.get_rank(), 0
    try:
        for number in range(16):
            _backward(model, number, scaler)
            if kind == "two backwards" and rank == 0:
                _backward(model, 50 + number, scaler)
            if kind == "a step left out" and rank == 1 and number == 9:
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    except gs.Disagreement as error:
        assert all(p.grad is None for p in model.parameters())
        return str(error), number
    finally:
        sync.detach()
    return "nothing", number


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scaled", [False, True])
def test_two_backwards_in_a_step_of_one_rank_are_noticed(plan: str, scaled: bool, run: Callable[..., Any]) -> None:
    (first, at), (second, _) = run(train_unequally, PLANS[plan], "two backwards", scaled)
    assert first == second
    assert "since the last synchronization on rank 1, but" in first
    assert "on rank 0: call backward() and step() equally often" in first
    assert at <= 3


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_that_one_rank_leaves_out_is_noticed(plan: str, ranks: int, run: Callable[..., Any]) -> None:
    said = [text for text, _ in run(train_unequally, PLANS[plan], "a step left out", False, ranks=ranks)]
    others = "rank 0" if ranks == 2 else "ranks 0 and 2"
    assert set(said) == {said[0]}
    assert f"since the last synchronization on {others}, but" in said[0]
    assert "on rank 1: call" in said[0]


def leave_out_what_nobody_applies() -> None:
    """After a NaN that all ranks skip, one steps and one does not: nothing is lost, and nobody minds."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, guard=gs.Guard(nonfinite="skip", max_skips=9))
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(8):
            loss = model(torch.randn(4, 8)).square().mean()
            (loss * float("nan") if number in (2, 3, 6) and rank == 0 else loss).backward()
            assert sync.dropped == (number in (2, 3, 6))
            if sync.dropped and rank == 1:
                continue
            optimizer.step()
            optimizer.zero_grad()
    assert_replicas_equal(model)
    sync.detach()


def test_a_step_left_out_because_all_dropped_it_is_no_mistake(run: Callable[..., Any]) -> None:
    run(leave_out_what_nobody_applies)


def drain_here_and_step_there() -> None:
    """Windows of join(): a rank without data drains while another counts micro-batches."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(3)))
    for batches in ([1, 9, 4], [7, 0, 2], [3, 3, 3]):
        with sync.join():
            for number in range(batches[dist.get_rank()]):
                _backward(model, number)
                optimizer.step()
                optimizer.zero_grad()
            while sync.drain():
                optimizer.step()
                optimizer.zero_grad()
        assert_replicas_equal(model)
    sync.broadcast()
    sync.load_state_dict(sync.state_dict())
    for number in range(6):
        _backward(model, number)
        if not sync.mid_window:
            optimizer.step()
            optimizer.zero_grad()
    assert_replicas_equal(model)
    sync.detach()


def test_uneven_windows_that_are_drained_are_no_mistake(run: Callable[..., Any]) -> None:
    run(drain_here_and_step_there, ranks=3)


def step_without_our_knowledge() -> None:
    """No optimizer was given to attach: how often it steps is not known, and nothing is said of it."""
    model = mlp()
    sync = gs.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        _backward(model, number)
        if dist.get_rank() == 0:
            optimizer.step()
    sync.detach()


def test_without_an_optimizer_nothing_is_compared(run: Callable[..., Any]) -> None:
    run(step_without_our_knowledge)
