"""A scheduler that is stepped per micro-batch is noticed, once; one that keeps step with the optimizer is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

import gradsync as gs

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=100),
    "rarely": lambda optimizer: StepLR(optimizer, step_size=7),
}


def schedule(name: str, k: int, when: str, with_mine: bool) -> list[str]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = gs.attach(model, optimizer if with_mine else None, gs.Plan(pace=gs.accumulate(k)))
    scheduler = SCHEDULERS[name](optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(25):
            model(torch.randn(2, 2) + dist.get_rank()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            # An epoch's end is mostly inside a window.
            if {"micro-batch": True, "window": not sync.mid_window, "epoch": number % 5 == 4}[when]:
                scheduler.step()
    sync.detach()
    return [str(each.message) for each in caught if "learning rate changes inside" in str(each.message)]


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_scheduler_stepped_per_micro_batch_is_told_of_once(k: int, run: Callable[..., Any]) -> None:
    said, nothing = run(schedule, "one cycle", k, "micro-batch", True)
    assert not nothing, "one rank says it"
    assert len(said) == 1
    assert f"inside windows of accumulate({k}), from " in said[0]
    assert f"runs {k} times as fast as the optimizer" in said[0]
    assert "`if not sync.mid_window: scheduler.step()`" in said[0]


@pytest.mark.parametrize(
    ("name", "k", "when"),
    [("one cycle", 4, "window"), ("one cycle", 3, "epoch"), ("one cycle", 1, "micro-batch"), ("rarely", 4, "window")],
)
def test_one_that_keeps_step_is_not(name: str, k: int, when: str, run: Callable[..., Any]) -> None:
    assert run(schedule, name, k, when, True) == [[], []]
