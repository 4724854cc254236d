"""Trainings in which one rank raises once, written down by hand: the gradient of every batch is its own power of two.

So the weights tell which batches were applied, of which rank, and how often; all sums are exact.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.plan.paces import Accumulate, Pace
from models import Raises

WIDTH = 300  # more than a bucket
BATCHES = 8
AT = 4  # the batch, or the window's first, that raises
BACKWARDS = ("before the first gradient", "in the middle", "after the last gradient")
WHERE = (*BACKWARDS, "forward", "loader")
MODES = ("plain", "no_sync on 1", "no_sync on 2", "weighted", "join")
PACES: dict[str, Pace] = {
    "every_step": gs.every_step(),
    "accumulate": gs.accumulate(2),
    "accumulate backwards": gs.accumulate(2, backwards=2),
    "local_sgd": gs.local_sgd(2),
    "diloco": gs.diloco(2, gs.nesterov(1.0, 0.0)),
    "diloco streaming": gs.diloco(4, gs.nesterov(1.0, 0.0), fragments=2, delay=1, mixing=0.5),
    "delayed": gs.delayed(1),
    "async_sgd": gs.async_sgd(0),
    "gossip": gs.gossip("ring"),
}
EVERYWHERE = ("every_step", "accumulate", "accumulate backwards", "delayed")  # they drop a batch on every rank


class Cell(NamedTuple):
    """One training of the table."""

    pace: str
    where: str
    mode: str
    steps: bool  # whether the loop calls step() after a batch that raised

    def __str__(self) -> str:
        return f"{self.pace}, {self.where}, {self.mode}, step() {'called' if self.steps else 'skipped'}"

    @property
    def refused(self) -> str:
        """Why this makes no sense; "" if it does."""
        if self.mode in ("weighted", "join") and self.pace not in EVERYWHERE[:3]:
            return "weights and join() need a mean of gradients in every step"
        if self.mode.startswith("no_sync") and self.pace == "accumulate backwards":
            return "a micro-batch of two backward calls, and one of two micro-batches, are not nested"
        return ""

    @property
    def micro_batches(self) -> int:
        """In a window by hand."""
        return 2 if self.mode.startswith("no_sync") else 1

    @property
    def dropped(self) -> range:
        """The batches that all ranks drop, or only the one that raised."""
        if self.pace in ("accumulate", "accumulate backwards"):
            return range(AT, AT + 2 * self.micro_batches)
        return range(AT, AT + self.micro_batches)


CELLS = [Cell(*each) for each in itertools.product(PACES, WHERE, MODES, (True, False))]


class Line(torch.nn.Module):
    """(a + b)·x: the gradient of both is x. Raises where it is told to, once."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(WIDTH))
        self.b = torch.nn.Parameter(torch.zeros(WIDTH))
        self.armed = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed == "forward":
            raise ArithmeticError("a user's own exception")
        traps = [Raises.apply if self.armed == where else torch.clone for where in BACKWARDS]
        first = traps[2](x.clone().requires_grad_()).sum() * 0 + (self.a * x).sum()
        return traps[0](traps[1](first) + (self.b * x).sum())


class Loader:
    """Its batches, which raises once and goes on with the next."""

    def __init__(self, batches: list[float], raises_at: int | None) -> None:
        self._batches = iter(enumerate(batches))
        self._raises_at = raises_at

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return self

    def __next__(self) -> tuple[int, float]:
        index, value = next(self._batches)
        if index == self._raises_at:
            raise ArithmeticError("a user's own exception")
        return index, value


def gradient(batch: int, rank: int) -> float:
    """Sums of them are exact, and tell which there were."""
    return 2.0**batch * (1 if rank == 0 else 2**BATCHES)


class Training:
    """One cell on one rank."""

    def __init__(self, cell: Cell, raising: list[int], attach: Callable[..., gs.GradSync] = gs.attach) -> None:
        self.cell, self.rank = cell, dist.get_rank()
        self.model = Line()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.sync = attach(self.model, self.optimizer, gs.Plan(pace=PACES[cell.pace], bucket_bytes=1024))
        self.raises_at = AT + int(cell.mode == "no_sync on 2") if self.rank in raising else None
        self.window_raised = False

    def run(self, num: int) -> None:
        values = [gradient(batch, self.rank) for batch in range(num)]
        loader = Loader(values, self.raises_at if self.cell.where == "loader" else None)
        batches = iter(self.sync.data(loader))
        for number in range(num):
            is_last = number % self.cell.micro_batches == self.cell.micro_batches - 1
            self.batch(number, batches, is_last)

    def batch(self, number: int, batches: Iterator[tuple[int, float]], is_last: bool) -> None:
        raised = False
        try:
            index, value = next(batches)
            assert index == number
            self.backward(number, value, is_last)
        except ArithmeticError:
            raised = self.window_raised = True
        if is_last:
            if not self.window_raised or self.cell.steps:
                self.optimizer.step()
            self.window_raised = False
        if is_last or raised:
            self.optimizer.zero_grad()

    def backward(self, number: int, value: float, is_last: bool) -> None:
        self.model.armed = self.cell.where if number == self.raises_at else ""
        if self.cell.mode == "weighted" and self.sync._steps.pace.backwards == 0:
            self.sync.set_batch_weight(1.0 if self.rank == 0 else 3.0)
        for _ in range(PACES[self.cell.pace].backwards if isinstance(PACES[self.cell.pace], Accumulate) else 1):
            with contextlib.nullcontext() if is_last else self.sync.no_sync():
                self.model(torch.full((WIDTH,), value)).backward()

    def finish(self) -> None:
        while self.sync.drain():
            self.optimizer.step()
            self.optimizer.zero_grad()


class Told(NamedTuple):
    """What a rank has to say of its training."""

    weights: torch.Tensor
    num_synchronizations: int
    warnings: list[str]
    dropped: list[bool]


def play(cell: Cell, raising: list[int]) -> Told:
    """One rank's part."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training(cell, raising)
        if cell.mode == "join":
            with training.sync.join():
                training.run(BATCHES - (2 if training.rank else 0))
        else:
            training.run(BATCHES)
        training.finish()
        weights = torch.stack([training.model.a.detach(), training.model.b.detach()])
        step = training.sync._lane.step
        training.sync.detach()
    return Told(weights, step, [str(each.message) for each in caught], [])


def expected(cell: Cell, ranks: int, raising: list[int]) -> float:
    """The weight, by hand."""
    total = 0.0
    weights = [3.0 if cell.mode == "weighted" and rank else 1.0 for rank in range(ranks)]
    for batch in range(BATCHES):
        there = [rank for rank in range(ranks) if not (cell.mode == "join" and rank and batch >= BATCHES - 2)]
        mass = sum(weights[rank] for rank in there)
        for rank in there:
            if batch in cell.dropped and (cell.pace in EVERYWHERE or rank in raising):
                continue
            total += weights[rank] * gradient(batch, rank) / mass / (2 if cell.pace.startswith("accumulate") else 1)
    return -total * (2 if cell.pace == "accumulate backwards" else 1)
