"""`optimizer.step(closure)`: backward runs inside of step, and everything else is as without a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs

PACES = [gs.accumulate(2), gs.delayed(1), gs.local_sgd(2), gs.diloco(2), gs.async_sgd(0), gs.gossip()]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def train(plan: gs.Plan, closed: bool, micro_batches: int = 1, idle_rank: int = -1) -> list[torch.Tensor]:
    """`idle_rank` has a loss that touches no parameter."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, plan)
    for step in range(0, 4 * micro_batches, micro_batches):
        for micro_batch in range(1, micro_batches):
            with sync.no_sync():
                model(batch(step + micro_batch)).square().mean().backward()

        def closure(step: int = step) -> torch.Tensor:
            loss = model(batch(step)).square().mean()
            if dist.get_rank() == idle_rank:
                loss = loss.detach().requires_grad_()
            loss.backward()
            return loss

        if closed:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        optimizer.zero_grad()
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    return [param.detach().clone() for param in model.parameters()]


def compare(plan: gs.Plan, **options: int) -> None:
    for ours, plain in zip(train(plan, True, **options), train(plan, False, **options), strict=True):
        assert torch.equal(ours, plain), (plan.pace, options)


def check_steps() -> None:
    compare(gs.Plan(), micro_batches=3)
    compare(gs.Plan(), idle_rank=1)
    for pace in PACES:
        compare(gs.Plan(pace=pace))


def test_a_closure_changes_nothing_whatever_the_pace(run: Callable[..., Any]) -> None:
    run(check_steps)


def no_backward_that_synchronizes() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    before = [param.detach().clone() for param in model.parameters()]

    def closure() -> torch.Tensor:
        with sync.no_sync():
            loss = model(batch(0)).square().mean()
            loss.backward()
        return loss

    with pytest.raises(gs.GradSyncError, match="would apply gradients that only this rank has"):
        optimizer.step(closure)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    sync.detach()


def test_a_closure_that_does_not_synchronize_is_refused_before_its_gradients_are_applied(
    run: Callable[..., Any],
) -> None:
    run(no_backward_that_synchronizes)


class Pair(nn.Module):
    """Two nets that are called by themselves, as a generator and a discriminator are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)


def take_turns() -> None:
    torch.manual_seed(0)
    model = Pair()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model.first, model.second)]
    sync = gs.attach(model, optimizers)
    for step in range(4):
        for turn in (0, 1):
            for net, trains in ((model.first, turn == 0), (model.second, turn == 1)):
                net.requires_grad_(trains)
            model.second(model.first(batch(step))).square().mean().backward()
            grads = [p.grad for p in (model.first, model.second)[turn].parameters() if p.grad is not None]
            assert len(grads) == 2
            for grad in grads:
                others = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
                dist.all_gather(others, grad)
                assert torch.equal(others[0], others[1])
            model.requires_grad_(True)
            optimizers[turn].step()  # the other net's gradients still stand
            optimizers[turn].zero_grad(set_to_none=False)
    sync.detach()


def test_a_parameter_that_was_frozen_for_a_turn_is_heard_again(run: Callable[..., Any]) -> None:
    run(take_turns)
