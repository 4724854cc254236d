"""Under Lightning Fabric: the weights of its stock DDP to the bit; save and load carry our state."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning_training import Here, assert_equal, weights
from torch import nn

import gradsync as gs
from global_state import changes, snapshot
from gradsync.integrations.fabric import GradSyncStrategy
from gradsync.launch.spawn import RankPool

Run = Callable[..., list[Any]]


def build(strategy: Any) -> tuple[Fabric, Any, Any]:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=[Here()])
    fabric.launch()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return fabric, *fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> float:
    loss = torch.tensor(0.0)
    for step in steps:
        for micro_batch in range(2):
            x = torch.randn(
                4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + dist.get_rank())
            )
            with fabric.no_backward_sync(model, enabled=micro_batch == 0):
                loss = (model(x) - x[:, :4]).square().mean() / 2
                fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def equals_ddp() -> None:
    stock = build(DDPStrategy())
    train(*stock, range(6))
    theirs = snapshot()
    ours = build(GradSyncStrategy(gs.auto(allow="exact", steps=2)))
    train(*ours, range(6))
    assert changes(theirs, snapshot()) == []
    assert_equal(weights(ours[1].module), weights(stock[1].module))
    assert ours[0].strategy.sync_of(ours[1]).stats()["steps"] == 6
    ours[0].strategy.teardown()


def resumes(folder: Path) -> None:
    plan = gs.Plan(compress=gs.int4())
    fabric, model, optimizer = build(GradSyncStrategy(plan))
    first = train(fabric, model, optimizer, range(1))
    train(fabric, model, optimizer, range(1, 10))
    state = {"model": model, "optimizer": optimizer, "step": 10}
    fabric.save(folder / "saved.ckpt", state)
    assert train(fabric, model, optimizer, range(10, 20)) < first

    again, other, its = build(GradSyncStrategy(plan))
    state = {"model": other, "optimizer": its, "step": 0}
    assert again.load(folder / "saved.ckpt", state, weights_only=True) == {}
    assert state["step"] == 10
    train(again, other, its, range(10, 20))
    assert_equal(weights(other.module), weights(model.module))
    for each in (fabric, again):
        each.strategy.teardown()

    stock, wrapped, theirs = build(DDPStrategy())
    remainder = stock.load(folder / "saved.ckpt", {"model": wrapped, "optimizer": theirs, "step": 0}, weights_only=True)
    assert list(remainder) == ["gradsync"]


def check_everything(folder: Path) -> None:
    equals_ddp()
    resumes(folder)


def test_a_wrong_guard_is_refused_when_the_strategy_is_made() -> None:
    with pytest.raises(TypeError, match=r"guard must be a gs\.Guard, got 5"):
        GradSyncStrategy(guard=5)  # type: ignore[arg-type]


def test_fabric_trains_what_its_ddp_trains_and_resumes_to_the_bit(run: Run, tmp_path: Path) -> None:
    run(check_everything, tmp_path)


def lose_a_rank() -> str:
    fabric, model, optimizer = build(GradSyncStrategy())
    train(fabric, model, optimizer, range(2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.PeerLost) as caught:
        train(fabric, model, optimizer, range(2, 4))
    return f"{caught.value.ranks} {caught.value}"


def test_a_killed_rank_is_named(warm: ForkServerContext) -> None:
    with RankPool(2, threads=1, context=warm) as pool:
        survivor, dead = pool.outcomes(lose_a_rank)
    assert "SIGKILL" in dead.text
    assert survivor.ok, survivor.text
    assert survivor.value.startswith("(1,) [rank 0/2 step 2")
