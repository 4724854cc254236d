"""`async_sgd` through `attach`: the same loop, equal to synchronous SGD where nothing is stale, and nobody held up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs

Ranks = Callable[..., list[Any]]


def model_and_optimizer(kind: str = "sgd") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    if kind == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def backward(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(6, 5, generator=generator)).square().mean().backward()


def train(plan: gs.Plan, steps: int, kind: str) -> torch.Tensor:
    model, optimizer = model_and_optimizer(kind)
    sync = gs.attach(model, optimizer, plan)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    sync.drain()
    sync.detach()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def compare(kind: str) -> None:
    assert torch.equal(train(gs.Plan(pace=gs.async_sgd(0)), 8, kind), train(gs.Plan(), 8, kind))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_without_staleness_it_is_synchronous_sgd_to_the_bit(kind: str, ranks: int, run: Ranks) -> None:
    run(compare, kind, ranks=ranks)


def stats_in_step() -> dict[str, Any]:
    model, optimizer = model_and_optimizer()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.async_sgd(0)))
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    stats = sync.stats()
    sync.detach()
    return stats


def test_without_staleness_no_push_is_late_from_the_first_on_and_no_bucket_travels(run: Ranks) -> None:
    for stats in run(stats_in_step):
        assert (stats["staleness_mean"], stats["staleness_max"], stats["clock_distance_max"]) == (0, 0, 0)
        assert (stats["nbytes"], stats["num_buckets"]) == (0, 0)
        assert (stats["clock"], stats["version"]) == (3, 3)


def take_unequally_many(max_staleness: int) -> torch.Tensor:
    rank = dist.get_rank()
    model, optimizer = model_and_optimizer()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.async_sgd(max_staleness)))
    for step in range(2 + 6 * rank):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    sync.drain()
    found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    backward(model, 99)  # all go on together
    sync.drain()
    assert sync.stats()["clock_distance_max"] <= max_staleness
    sync.detach()
    return found


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_rank_that_drains_early_holds_nobody_up(max_staleness: int, run: Ranks) -> None:
    first, *others = run(take_unequally_many, max_staleness, ranks=3)
    assert all(torch.equal(other, first) for other in others)


def abort() -> None:
    model, optimizer = model_and_optimizer()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.async_sgd(0)))
    handle = None
    for step in range(4):
        if step == 1 and dist.get_rank() == 1:
            handle = model[0].weight.register_hook(fail)  # type: ignore[index]
        try:
            backward(model, step)
        except ZeroDivisionError:
            assert handle is not None
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    sync.drain()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert bool(weights.isfinite().all())
    sync.detach()


def fail(grad: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def test_a_backward_that_raises_pushes_nothing_and_all_go_on(run: Ranks) -> None:
    run(abort)


def state_too_early() -> None:
    model, optimizer = model_and_optimizer()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.async_sgd(2)))
    backward(model, 0)
    optimizer.step()
    assert not sync.replicas_equal
    with pytest.raises(gs.GradSyncError, match=r"call sync.drain\(\) on all ranks first"):
        sync.state_dict()
    sync.drain()
    assert sync.replicas_equal
    assert sync.state_dict()
    sync.detach()


def test_a_state_in_the_middle_is_refused_with_the_way_out(run: Ranks) -> None:
    run(state_too_early)


def broadcast_later() -> torch.Tensor:
    model, optimizer = model_and_optimizer()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.async_sgd(0)))
    backward(model, 0)
    sync.drain()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
    sync.broadcast(source=1)
    sync.drain()
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert bool((values == 0.5).all())  # the shards went on from there
    sync.detach()
    return values


def test_owners_go_on_from_what_was_broadcast(run: Ranks) -> None:
    run(broadcast_later)


def meet_in_the_middle(call: Callable[[gs.GradSync, dict[str, torch.Tensor]], None]) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.async_sgd(0)))
    state = sync.state_dict()
    for _ in range(2):
        model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not sync.replicas_equal
    call(sync, state)
    assert sync.replicas_equal
    sync.detach()
    return model.weight.item()


def test_who_meets_in_the_middle_drains_first_and_loses_nothing(run: Ranks) -> None:
    assert run(meet_in_the_middle, broadcast) == [-3.0] * 2
    assert run(meet_in_the_middle, gather) == [-3.0] * 2
    assert run(meet_in_the_middle, load) == [0.0] * 2  # back to where the state was saved


def broadcast(sync: gs.GradSync, _: dict[str, torch.Tensor]) -> None:
    sync.broadcast()


def gather(sync: gs.GradSync, _: dict[str, torch.Tensor]) -> None:
    sync.state_dict(all_ranks=True)


def load(sync: gs.GradSync, state: dict[str, torch.Tensor]) -> None:
    sync.load_state_dict(state)


def step_without_gradients() -> None:
    model, optimizer = model_and_optimizer("adamw")
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.async_sgd(0)))
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert not optimizer.state
    assert not torch.equal(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), before)
    sync.detach()


def test_owners_apply_gradients_and_the_loops_own_step_finds_none(run: Ranks) -> None:
    run(step_without_gradients)
