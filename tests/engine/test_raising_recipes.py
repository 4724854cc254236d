"""What a loop does between backward and step, clipping, a scheduler and a GradScaler, where one rank's batch raises.

The gradient of every batch is known by hand, so the weights are those of a plain loop over the batches that count.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from raising import AT, BATCHES, WHERE, WIDTH, Line, Loader, gradient
from torch.amp import GradScaler

import gradsync as gs
from gradsync.plan.paces import Pace

MAX_NORM = 1000.0  # of which some batches have less
PACES: dict[str, Pace] = {
    "every_step": gs.every_step(),
    "accumulate": gs.accumulate(2),
    "delayed": gs.delayed(1),
    "delayed by two": gs.delayed(2),
}


class Recipe(NamedTuple):
    """What the loop does with a gradient, and with a batch that raised."""

    clips: bool
    schedules: bool
    scales: bool
    steps: bool  # whether it calls step() after a batch that raised, or goes straight to the next one


RECIPES = [Recipe(*each) for each in itertools.product((True, False), repeat=4) if each[2] <= each[0]]


class Replica:
    """A model, and all that applies a gradient to it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.model = recipe, Line()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.scaler = GradScaler("cpu", init_scale=4.0, enabled=recipe.scales)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.75**step)

    def step(self, idle: Callable[[], bool] = bool) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.recipe.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.recipe.schedules and not idle():
            self.scheduler.step()
        self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        return torch.cat([param.detach() for param in self.model.parameters()])


def train(pace: str, where: str, recipe: Recipe, raising: int) -> torch.Tensor:
    replica, rank = Replica(recipe), dist.get_rank()
    plan, scaler = gs.Plan(pace=PACES[pace], bucket_bytes=1024), replica.scaler if recipe.scales else None
    sync = gs.attach(replica.model, replica.optimizer, plan, scaler=scaler)
    raises_at = AT if rank == raising else -1
    loader = Loader([gradient(batch, rank) for batch in range(BATCHES)], raises_at if where == "loader" else None)
    batches = iter(sync.data(loader))
    for number in range(BATCHES):
        replica.model.armed = where if number == raises_at else ""
        try:
            _, value = next(batches)
            replica.scaler.scale(replica.model(torch.full((WIDTH,), value))).backward()
        except ArithmeticError:
            if not recipe.steps:
                replica.optimizer.zero_grad()
                continue
        replica.step(lambda: sync.dropped or sync.mid_window)
    while sync.drain():
        replica.step()
    sync.detach()
    return replica.weights()


def by_hand(pace: str, recipe: Recipe) -> torch.Tensor:
    """One process with what all ranks have, without the batches that are dropped."""
    replica, size = Replica(recipe), PACES[pace].k if pace == "accumulate" else 1
    windows = [range(first, first + size) for first in range(0, BATCHES, size)]
    for window in (each for each in windows if AT not in each):
        mean = sum(gradient(batch, rank) for batch in window for rank in range(2)) / 2 / size
        replica.scaler.scale(replica.model(torch.full((WIDTH,), mean))).backward()
        replica.step()
    return replica.weights()


def train_all(pace: str, where: str) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [train(pace, where, recipe, number // 2 % 2) for number, recipe in enumerate(RECIPES)]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("pace", PACES)
def test_replicas_apply_the_batches_that_count_as_their_loops_do(
    pace: str, where: str, run: Callable[..., list[Any]]
) -> None:
    trained = run(train_all, pace, where)
    for recipe, *weights in zip(RECIPES, *trained, strict=True):
        expected = by_hand(pace, recipe)
        for rank, each in enumerate(weights):
            assert torch.equal(each, expected), (recipe, rank)
