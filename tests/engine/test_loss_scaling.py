"""A GradScaler that attach was given: the loop of one process, with every pace, and where steps have no gradients."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.plan.paces import Pace
from models import mlp
from yardstick import assert_replicas_equal

INF = 9  # the micro-batch whose loss is infinite on rank 1


def _model(fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, GradScaler]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return model, optimizer, GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


def _loss(forward: nn.Module, number: int) -> torch.Tensor:
    rank = dist.get_rank()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + number))
    loss: torch.Tensor = forward(x).square().mean()
    return loss * float("inf") if number == INF and rank == 1 else loss


def quietly(job: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return job(*args)


def _apply(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, clip: bool) -> None:
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def windows_like_ddp(k: int, clip: bool, fused: bool, guard: gs.Guard | None = None) -> None:
    """The loop of a single process, where DDP needs one that knows of windows."""
    model, optimizer, scaler = _model(fused)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(k), bucket_bytes=1024), guard=guard, scaler=scaler)
    for number in range(16):
        scaler.scale(_loss(model, number)).backward()
        _apply(model, optimizer, scaler, clip)
    ddp_model, ddp_optimizer, ddp_scaler = _model(fused)
    ddp = DistributedDataParallel(ddp_model)
    for number in range(16):
        if number % k < k - 1:
            with ddp.no_sync():
                ddp_scaler.scale(_loss(ddp, number) / k).backward()
        else:
            ddp_scaler.scale(_loss(ddp, number) / k).backward()
            _apply(ddp_model, ddp_optimizer, ddp_scaler, clip)
    for ours, theirs in zip(model.parameters(), ddp_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert scaler.state_dict() == ddp_scaler.state_dict()
    sync.detach()
    assert type(scaler) is GradScaler


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("k", "fused"), [(1, False), (2, False), (4, False), (2, True)])
def test_a_scaler_in_windows_equals_ddp(k: int, clip: bool, fused: bool, run: Callable[..., Any]) -> None:
    run(windows_like_ddp, k, clip, fused)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_scale_follows_a_step_that_all_skipped(k: int, run: Callable[..., Any]) -> None:
    run(quietly, windows_like_ddp, k, True, False, gs.Guard(nonfinite="skip"))


def overflowing(pace: str) -> tuple[float, list[float]]:
    """A scale with which everything overflows, as fp16 begins."""
    model, optimizer, _ = _model()
    scaler = GradScaler("cpu", init_scale=2.0**127)
    plan = gs.Plan(pace=gs.delayed(1) if pace == "delayed" else gs.every_step())
    sync = gs.attach(model, optimizer, plan, guard=gs.Guard(nonfinite="skip", max_skips=9), scaler=scaler)
    before = next(model.parameters()).detach().clone()
    scales = []
    for number in range(16):
        scaler.scale(_loss(model, number % INF) * 100.0).backward()
        _apply(model, optimizer, scaler, clip=True)
        scales.append(scaler.get_scale())
    assert not torch.equal(before, next(model.parameters()))
    sync.detach()
    return float(sync.stats()["skipped_steps"]), scales


@pytest.mark.parametrize("pace", ["every step", "delayed"])
def test_a_scale_that_overflows_comes_down_though_all_skip(pace: str, run: Callable[..., Any]) -> None:
    (skipped, scales), (_, others) = run(quietly, overflowing, pace)
    assert scales == others
    assert skipped > 1
    assert min(scales) == 2.0 ** (127 - skipped)


def scaler_unknown(pace: Pace) -> str:
    model, optimizer, scaler = _model()
    sync = gs.attach(model, optimizer, gs.Plan(pace=pace))
    scaler.scale(_loss(model, 0)).backward()
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        return str(error)
    finally:
        sync.detach()
    return ""


@pytest.mark.parametrize(
    ("pace", "said"), [(gs.every_step(), ""), (gs.accumulate(2), "No inf"), (gs.delayed(1), "No inf")]
)
def test_a_scaler_that_attach_does_not_know_ends_in_torchs_own_sentence(
    pace: Pace, said: str, run: Callable[..., Any]
) -> None:
    """As docs/choosing.md and docs/limits.md say: torch asks before our hook is called."""
    for each in run(scaler_unknown, pace):
        assert each.startswith(said)
        assert bool(each) == bool(said)


def delayed_unasked(asks: bool) -> list[torch.Tensor]:
    model, optimizer, scaler = _model()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(2)), scaler=scaler)
    for number in range(6):
        scaler.scale(_loss(model, number)).backward()
        if not (asks and sync.mid_window):
            _apply(model, optimizer, scaler, clip=True)
    while sync.drain():
        _apply(model, optimizer, scaler, clip=True)
    sync.detach()
    return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]


def test_delayed_averages_need_not_be_asked_for_either(run: Callable[..., Any]) -> None:
    for unasked, asked in zip(run(delayed_unasked, False), run(delayed_unasked, True), strict=True):
        assert all(map(torch.equal, unasked, asked))


def step_without_gradients(what: str) -> list[float]:
    """Step 1 comes to nothing on rank 1, or on both."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    guard = gs.Guard(nonfinite="skip" if what == "skipped" else "allow")
    sync = gs.attach(model, optimizer, guard=guard, scaler=scaler)
    weights, rank = [], dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            x = torch.full((1, 1), float(rank + step), requires_grad=True)
            loss = model(x).sum()
            if what == "untouched" and rank == 1 and step > 0:
                loss = x.sum()
            elif what != "untouched" and rank == 1 and step == 1:
                loss = loss * float("inf")
            elif what == "infinite, then untouched" and rank == 1 and step == 2:
                loss = x.sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            weights.append(model.weight.item())
    assert_replicas_equal(model)
    sync.detach()
    return weights


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("untouched", [-0.5, -1.0, -2.0, -3.5]),  # rank 1 counts as zero
        ("skipped", [-0.5, -0.5, -3.0, -6.5]),
        ("infinite, then untouched", [-0.5, -0.5, -1.5, -5.0]),
    ],
)
def test_a_step_without_gradients_is_nothing_special(what: str, expected: list[float], run: Callable[..., Any]) -> None:
    assert run(step_without_gradients, what) == [expected] * 2


def overflow_in_company() -> list[float]:
    """Rank 0 is out of data when all skip a step, and has no update() of its own for it."""
    model, optimizer, scaler = _model()
    sync = gs.attach(model, optimizer, guard=gs.Guard(nonfinite="skip"), scaler=scaler)
    scales = []
    for epoch in range(2):
        with sync.join():
            for number in range(2 if dist.get_rank() == 0 else 4):
                scaler.scale(_loss(model, INF if (epoch, number) == (0, 3) else number)).backward()
                _apply(model, optimizer, scaler, clip=False)
                scales.append(scaler.get_scale())
    assert_replicas_equal(model)
    sync.detach()
    return scales


def test_a_step_skipped_in_company_lowers_the_scale_once(run: Callable[..., Any]) -> None:
    short, long = run(quietly, overflow_in_company)
    assert long[3] == long[2] / 2
    assert short == [*long[:2], *long[4:6]]


def rescale_in_a_window() -> float:
    """Another optimizer's infinity lowers the scale while a window is open."""
    model, other = nn.Linear(1, 1, bias=False), nn.Parameter(torch.zeros(1))
    nn.init.zeros_(model.weight)
    optimizer, second = torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD([other], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(2)), scaler=scaler)
    for number in range(2):
        scaler.scale(model(torch.full((1, 1), float(dist.get_rank() + number))).sum()).backward()
        scaler.scale(other.sum() * (float("inf") if number == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()
        second.zero_grad()
    assert scaler.get_scale() == 4.0
    sync.detach()
    return model.weight.item()


def test_a_scale_that_changes_inside_a_window_changes_what_is_in_it(run: Callable[..., Any]) -> None:
    assert run(rescale_in_a_window) == [-(0 + 1 + 1 + 2) / 4] * 2


def share_a_scaler() -> None:
    """Two models with a scaler, attached and detached in turn."""
    (one, first, scaler), (two, second, _) = _model(), _model()
    syncs = [
        gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(2)), scaler=scaler)
        for model, optimizer in ((one, first), (two, second))
    ]
    for number in range(4):
        scaler.scale(_loss(one, number) + _loss(two, number)).backward()
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()
        for optimizer in (first, second):
            optimizer.zero_grad()
    assert scaler.state_dict()["_growth_tracker"] == 0
    assert scaler.get_scale() == 2.0**9, "two steps of four micro-batches"
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert isinstance(scaler, GradScaler)
    assert type(copy.deepcopy(scaler)) is GradScaler
    assert type(pickle.loads(pickle.dumps(scaler))) is GradScaler  # noqa: S301  # our own
    syncs[0].detach()
    scaler.scale(_loss(two, 5)).backward()
    scaler.step(second)  # in the middle of a window still
    scaler.update()
    syncs[1].detach()
    assert type(scaler) is GradScaler


def test_several_models_may_have_one_scaler(run: Callable[..., Any]) -> None:
    run(share_a_scaler)


def join_with_a_scaler() -> dict[str, Any]:
    model, optimizer, scaler = _model()
    sync = gs.attach(model, optimizer, scaler=scaler, guard=gs.Guard(drift="raise"))
    for _ in range(2):
        with sync.join():
            for number in range(2 + 3 * dist.get_rank()):
                scaler.scale(_loss(model, number)).backward()
                _apply(model, optimizer, scaler, clip=False)
    assert_replicas_equal(model)
    sync.detach()
    return scaler.state_dict()


def test_after_join_all_have_the_scale_of_the_last(run: Callable[..., Any]) -> None:
    first, second = run(join_with_a_scaler)
    assert first == second


def unscale_what_others_brought() -> list[tuple[float, float]]:
    """On each step the gradient after unscale_(), and after step(); rank 1's loss touches no parameter."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    sync, found = gs.attach(model, optimizer, scaler=scaler), []
    for step in range(3):
        x = torch.full((1, 1), 2.0 * (step + 1), requires_grad=True)
        loss = model(x).sum() if dist.get_rank() == 0 or step == 0 else x.sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert model.weight.grad is not None, "it took part, so that it clips what all apply"
        unscaled = model.weight.grad.item()
        scaler.step(optimizer)
        scaler.update()
        found.append((unscaled, model.weight.grad.item()))
        optimizer.zero_grad()
    sync.detach()
    return found


def test_a_rank_whose_loss_touched_nothing_unscales_the_average_of_the_others(run: Callable[..., Any]) -> None:
    assert run(unscale_what_others_brought) == [[(2.0, 2.0), (2.0, 2.0), (3.0, 3.0)]] * 2
