"""A scheduler that is stepped per micro-batch is noticed, once; one that keeps step with the optimizer is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import gradsync as gs

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 10),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [10, 20]),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10),
    "by hand": lambda optimizer: ByHand(optimizer),
}


class ByHand:
    """Somebody's own, which torch knows nothing of."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = optimizer.param_groups

    def step(self) -> None:
        for group in self.groups:
            group["lr"] *= 0.99


def schedule(name: str, k: int, when: str, late: bool) -> list[str]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = None if late else SCHEDULERS[name](optimizer)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(k)))
    scheduler = scheduler or SCHEDULERS[name](optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(30):
            model(torch.randn(2, 2) + dist.get_rank()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if when == "fraction":
                scheduler.step(number / 10)
            # An epoch's end is mostly inside a window.
            elif {
                "micro-batch": True,
                "window": not sync.mid_window,
                "first of a window": number % k == 0,
                "epoch": number % 5 == 4,
            }[when]:
                scheduler.step()
    sync.detach()
    return [str(each.message) for each in caught if "as fast as the optimizer" in str(each.message)]


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "kind"), [("one cycle", "OneCycleLR"), ("step", "StepLR"), ("milestones", "MultiStepLR")]
)
def test_a_scheduler_stepped_per_micro_batch_is_told_of_once(
    name: str, kind: str, k: int, run: Callable[..., Any]
) -> None:
    said, nothing = run(schedule, name, k, "micro-batch", k == 3)
    assert not nothing, "one rank says it"
    assert len(said) == 1
    assert f"{kind} steps {k} times in each window of accumulate({k}): a scheduler" in said[0]
    assert f"runs {k} times as fast as the optimizer" in said[0]
    assert "`if not sync.mid_window: scheduler.step()`" in said[0]


def test_so_is_one_that_is_not_torchs_by_its_rate(run: Callable[..., Any]) -> None:
    [said], nothing = run(schedule, "by hand", 4, "micro-batch", True)
    assert not nothing
    assert "the learning rate changes inside windows of accumulate(4), from " in said
    assert run(schedule, "by hand", 4, "window", True) == [[], []]


@pytest.mark.parametrize(
    ("name", "k", "when"),
    [
        ("one cycle", 1, "micro-batch"),
        ("one cycle", 4, "window"),
        ("one cycle", 2, "first of a window"),
        ("one cycle", 3, "epoch"),
        ("step", 4, "window"),
        ("sequence", 4, "window"),
        ("sequence", 4, "epoch"),
        ("restarts", 4, "fraction"),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_one_that_keeps_step_is_not(name: str, k: int, when: str, run: Callable[..., Any]) -> None:
    for late in (True, False):
        assert run(schedule, name, k, when, late) == [[], []]
