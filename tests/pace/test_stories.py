"""What a stranger ran into, pace by pace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.amp import GradScaler

import gradsync as gs
from gradsync.plan.paces import Pace

Ranks = Callable[..., list[Any]]
PARAMETER_PACES: dict[str, Pace] = {
    "local_sgd": gs.local_sgd(2),
    "diloco": gs.diloco(2, gs.nesterov(1.0, 0.0)),
    "gossip": gs.gossip(),
    "async_sgd": gs.async_sgd(0),
}


class Loop:
    """A small model and its loop, with or without what people do between backward and step."""

    def __init__(self, pace: Pace, scale: float | None = None, guard: gs.Guard | None = None) -> None:
        torch.manual_seed(1)
        layers = (torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.scaler = None if scale is None else GradScaler("cpu", init_scale=scale, growth_interval=1000)
        plan = gs.Plan(pace=pace)
        self.sync = gs.attach(self.model, self.optimizer, plan, guard=guard, scaler=self.scaler)

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = self.model(torch.randn(8, 4, generator=generator)).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, step: int, clip: float | None = None) -> None:
        self.backward(step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.apply()

    def apply(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        elif not self.sync.mid_window:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def finish(self) -> torch.Tensor:
        while self.sync.drain():
            self.apply()
        weights = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        self.sync.detach()
        return weights


def scaled_is_unscaled(pace: Pace) -> None:
    found = []
    for scale in (None, 1024.0):  # a power of two changes no bit
        loop = Loop(pace, scale)
        for step in range(5):
            loop.step(step)
        found.append(loop.finish())
    assert torch.equal(*found)


@pytest.mark.parametrize("pace", [*PARAMETER_PACES.values(), gs.delayed(2)], ids=repr)
def test_a_grad_scaler_changes_nothing(pace: Pace, run: Ranks) -> None:
    run(scaled_is_unscaled, pace)


def step_past_the_scaler() -> None:
    loop = Loop(gs.delayed(1), scale=1024.0)
    for step in range(3):
        loop.step(step)
    assert loop.sync.drain()
    with pytest.raises(gs.GradSyncError, match=r"call scaler.step\(optimizer\)"):
        loop.optimizer.step()
    loop.sync.detach()


def test_a_step_past_the_scaler_is_refused(run: Ranks) -> None:
    run(step_past_the_scaler)


def clipped_to_nothing(pace: Pace) -> None:
    loop = Loop(pace)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in loop.model.parameters()])
    for step in range(4):
        loop.step(step, clip=0.0)
    assert torch.equal(loop.finish(), before)


@pytest.mark.parametrize("pace", PARAMETER_PACES)
def test_clipping_counts(pace: str, run: Ranks) -> None:
    run(clipped_to_nothing, PARAMETER_PACES[pace])


def equal_buffers(pace: Pace) -> torch.Tensor:
    loop = Loop(pace)
    for step in range(3):
        loop.step(step)
    loop.finish()
    mean = loop.model[1].running_mean
    assert isinstance(mean, torch.Tensor)
    return mean.clone()


@pytest.mark.parametrize("pace", PARAMETER_PACES)
def test_after_drain_buffers_are_those_of_rank_0(pace: str, run: Ranks) -> None:
    first, *others = run(equal_buffers, PARAMETER_PACES[pace], ranks=3)
    assert all(torch.equal(other, first) for other in others)


def bring_nan(pace: Pace) -> str:
    loop = Loop(pace, guard=gs.Guard(nonfinite="raise", timeout=20))
    try:
        for step in range(5):
            if step == 1 and dist.get_rank() == 1:
                next(loop.model.parameters()).register_hook(lambda grad: grad * float("nan"))
            loop.step(step)
        loop.finish()
    except gs.GradSyncError as error:
        loop.sync.detach()
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("pace", PARAMETER_PACES)
def test_a_nan_that_is_not_allowed_ends_the_run_on_every_rank(pace: str, run: Ranks) -> None:
    said = run(bring_nan, PARAMETER_PACES[pace])
    assert "nothing" not in said
    assert said[1] == "NonFinite"


def change_pace(before: Pace, after: Pace) -> tuple[torch.Tensor, int]:
    first = Loop(before)
    for step in range(3):
        first.step(step)
    if before == PARAMETER_PACES["async_sgd"]:
        first.sync.drain()
    model, state = first.model.state_dict(), first.sync.state_dict()
    second = Loop(after)
    second.model.load_state_dict(model)
    with (
        pytest.warns(UserWarning, match="this state was saved with pace")
        if dist.get_rank() == 0
        else contextlib.nullcontext()
    ):
        second.sync.load_state_dict(state)
    first.sync.detach()
    for step in range(3, 6):
        second.step(step)
    return second.finish(), dist.get_rank()


@pytest.mark.parametrize("after", [gs.every_step(), gs.delayed(1), gs.gossip(), gs.async_sgd(0)], ids=repr)
@pytest.mark.parametrize("before", [gs.local_sgd(4), gs.gossip(), gs.async_sgd(0)], ids=repr)
def test_another_pace_takes_over_with_a_warning_and_equal_replicas(before: Pace, after: Pace, run: Ranks) -> None:
    if type(before) is type(after):
        pytest.skip("the same pace")
    (first, _), *others = run(change_pace, before, after)
    assert all(torch.equal(other, first) for other, _ in others)


def drain_after_no_sync(pace: Pace) -> None:
    loop = Loop(pace)
    with loop.sync.no_sync():
        loop.backward(0)
    with pytest.raises(gs.GradSyncError, match="last backward of a step outside of it"):
        loop.sync.drain()
    loop.backward(1)
    loop.apply()
    loop.finish()


@pytest.mark.parametrize("pace", PARAMETER_PACES)
def test_draining_what_only_one_rank_knows_is_refused(pace: str, run: Ranks) -> None:
    run(drain_after_no_sync, PARAMETER_PACES[pace])


def no_sync_inside_a_window() -> None:
    loop = Loop(gs.accumulate(2))
    for step in range(4):
        with loop.sync.no_sync():
            loop.backward(2 * step)
        loop.step(2 * step + 1)
    loop.finish()


def test_a_window_may_hold_backwards_under_no_sync(run: Ranks) -> None:
    run(no_sync_inside_a_window)


def thaw_later() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.async_sgd(0)))
    model.bias.requires_grad_(True)
    with pytest.raises(gs.GradSyncError, match="was frozen at attach"):
        model(torch.ones(1, 2)).sum().backward()
    sync.detach()


def test_thawing_is_refused_where_it_would_not_travel(run: Ranks) -> None:
    run(thaw_later)


def attach_lbfgs() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="LBFGS runs several backwards in one step, and diloco counts backwards"):
        gs.attach(model, torch.optim.LBFGS(model.parameters()), gs.Plan(pace=gs.diloco(2)))


def test_lbfgs_is_refused(run: Ranks) -> None:
    run(attach_lbfgs)


def leave_with_an_error() -> str:
    loop = Loop(gs.async_sgd(1), guard=gs.Guard(timeout=30))
    try:
        for step in range(20):
            if step == 3 and dist.get_rank() == 1:
                raise KeyError("a bug of the user's")
            loop.step(step)
        loop.finish()
    except (KeyError, gs.GradSyncError) as error:
        loop.sync.detach()
        return type(error).__name__
    return "nothing"


def test_a_users_error_is_not_hidden_by_detach(run: Ranks) -> None:
    said = run(leave_with_an_error)
    assert said[1] == "KeyError"
    assert said[0] in ("PeerLost", "SyncTimeout", "GradSyncError")
