"""Delayed averages and a GradScaler: the scale travels with the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delayed_runs import scalar, weights
from torch import nn
from torch.amp import GradScaler

import gradsync as gs
from models import Raises


def with_scaler(scales: list[float]) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=1.0, enabled=bool(scales))
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(2)), scaler=scaler)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        scaler.scale(model(torch.randn(5, 8, generator=generator)).square().mean()).backward()
        if not sync.mid_window:
            scaler.step(optimizer)
            scaler.update(scales.pop() if scales else None)
        optimizer.zero_grad()
    while sync.drain():
        scaler.step(optimizer)
        scaler.update(scales.pop() if scales else None)
    sync.detach()
    return weights(model)


def test_with_a_changing_scale_it_equals_the_run_without(run: Callable[..., Any]) -> None:
    unscaled = run(with_scaler, [])
    scaled = run(with_scaler, [2.0, 256.0, 0.25, 64.0, 1.0, 8.0])
    assert torch.equal(scaled[0], unscaled[0])
    assert torch.equal(scaled[0], scaled[1])


def unknown_scaler(given: bool) -> str:
    model, optimizer, sync = scalar(1, scaler=GradScaler("cpu") if given else None)
    scaler = GradScaler("cpu")
    for _ in range(2):
        scaler.scale(model(1.0)).backward()
    with pytest.raises(gs.GradSyncError) as refusal:
        scaler.step(optimizer)
    assert model.weight.item() == 0
    sync.detach()
    return str(refusal.value)


def test_an_unknown_scaler_is_refused(run: Callable[..., Any]) -> None:
    assert "gs.attach(model, optimizer, plan, scaler=scaler)" in run(unknown_scaler, False)[0]
    assert "was given another one" in run(unknown_scaler, True, ranks=1)[0]


def unlike_scales() -> None:
    scaler = GradScaler("cpu", init_scale=2.0 ** (3 + dist.get_rank()))
    model, _, _ = scalar(1, scaler=scaler)
    scaler.scale(model(1.0)).backward()
    with pytest.raises(gs.Disagreement, match="GradScaler of rank 1 has scale 16 and that of rank 0 8"):
        scaler.scale(model(1.0)).backward()


def test_ranks_that_scale_differently_find_out(run: Callable[..., Any]) -> None:
    run(unlike_scales)


def skip_a_step_that_the_others_take(changes: bool) -> float:
    scaler = GradScaler("cpu", init_scale=2.0)
    model, optimizer, sync = scalar(1, scaler=scaler)
    for step in range(4):
        loss = model(2.0**step)
        raises = step == 1 and dist.get_rank() == 1
        try:
            scaler.scale(Raises.apply(loss) + 0 * model.other if raises else loss).backward()
        except ArithmeticError:
            continue
        scaler.step(optimizer)
        scaler.update(4.0 if changes and step == 1 else None)
        optimizer.zero_grad()
    while sync.drain():
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    sync.detach()
    return model.weight.item()


@pytest.mark.filterwarnings("ignore:.*the batch is skipped")
def test_a_rank_may_skip_a_scaled_step_that_the_others_take(run: Callable[..., Any]) -> None:
    assert run(skip_a_step_that_the_others_take, False) == [-(1.0 + 4 + 8)] * 2


def change_the_scale_meanwhile() -> None:
    with pytest.raises(gs.Disagreement, match="GradScaler of rank 1 has scale 2 and that of rank 0 4"):
        skip_a_step_that_the_others_take(changes=True)


def test_a_scale_that_changes_while_a_rank_is_behind_is_told(run: Callable[..., Any]) -> None:
    run(change_the_scale_meanwhile)


def test_what_is_no_scaler_is_refused(run: Callable[..., Any]) -> None:
    run(give_something_else, ranks=1)


def give_something_else() -> None:
    with pytest.raises(TypeError, match=r"scaler must be a torch.amp.GradScaler, got 65536"):
        scalar(1, scaler=65536)
