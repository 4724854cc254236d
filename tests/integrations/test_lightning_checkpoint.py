"""Our state inside of Lightning's checkpoints: a resumed run is the uninterrupted one, and files change hands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning_training import Plain, assert_equal, loader, trainer, weights

import gradsync as gs
from gradsync.integrations.lightning import GradSyncStrategy
from gradsync.integrations.lightning_ddp import DDPHook, average_bucket

Run = Callable[..., list[Any]]
Made = Callable[[], tuple[Any, list[Any]]]


def attached(plan: gs.Plan | None = None) -> Made:
    return lambda: (GradSyncStrategy(plan), [])


def stock() -> tuple[Any, list[Any]]:
    return DDPStrategy(find_unused_parameters=True), []


def hooked() -> tuple[Any, list[Any]]:
    hook = DDPHook(gs.Plan(compress=gs.int8()))
    strategy = DDPStrategy(ddp_comm_state=hook, ddp_comm_hook=average_bucket, find_unused_parameters=True)
    return strategy, [hook]


def train(made: Made, epochs: int, folder: Path, resume: Path | None = None) -> Plain:
    strategy, callbacks = made()
    model = Plain()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    runs = trainer(strategy, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver, *callbacks])
    runs.fit(model, loader(), loader(16), ckpt_path=resume, weights_only=True)
    runs.save_checkpoint(folder / "after.ckpt")
    return model


def resumes(folder: Path, made: Made, first: Made | None = None) -> None:
    """Stopped after an epoch and resumed, from what was saved during fit and from what was saved after it."""
    whole = train(made, 3, folder / "whole") if first is None else train(first, 3, folder / "whole")
    train(first or made, 1, folder / "begun")
    for name in ("epoch=0.ckpt", "after.ckpt"):
        again = train(made, 3, folder / f"again-{name}", folder / "begun" / name)
        assert_equal(dict(again.named_parameters()), dict(whole.named_parameters()), name)
        if dist.get_rank() == 0:
            assert_equal(weights(again), weights(whole), name)


def check_resuming(folder: Path) -> None:
    compressed = attached(gs.Plan(compress=gs.int4()))
    resumes(folder / "int4", compressed)
    file = torch.load(folder / "int4" / "begun" / "epoch=0.ckpt", weights_only=True)
    mine, theirs = (file["gradsync"][f"gradsync.rank{rank}.residual.body.0.weight"] for rank in (0, 1))
    assert mine.any()
    assert not torch.equal(mine, theirs), "ranks must owe different things, or resuming proves nothing"
    resumes(folder / "hook", hooked)


def test_a_resumed_run_is_the_uninterrupted_one(run: Run, tmp_path: Path) -> None:
    """With what compression owes, attached and as a hook under DDP."""
    run(check_resuming, tmp_path)


def check_changing_hands(folder: Path) -> None:
    resumes(folder / "theirs", attached(), first=stock)
    resumes(folder / "ours", stock, first=attached())


def test_checkpoints_of_stock_ddp_and_ours_are_interchangeable(run: Run, tmp_path: Path) -> None:
    run(check_changing_hands, tmp_path)


def warns_of_ranks_that_differ(folder: Path) -> None:
    strategy = GradSyncStrategy(gs.Plan(pace=gs.local_sgd(4)))  # of six steps in an epoch

    def save() -> None:
        saver = ModelCheckpoint(folder, filename="{epoch}", save_weights_only=False)
        runs = trainer(strategy, max_epochs=1, enable_checkpointing=True, callbacks=[saver])
        runs.fit(Plain(), loader(), loader(16))

    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="holds rank 0's model, and with LocalSGD"):
            save()
    else:
        save()


def test_a_checkpoint_between_two_averages_is_warned_of(run: Run, tmp_path: Path) -> None:
    run(warns_of_ranks_that_differ, tmp_path)
