"""One rank's input pipeline is slow: what a stopwatch around the step shows, and what the trace says.

    rank 0   input ─ forward ─ backward ─ waits ····················│
    rank 1   input ····················· ─ forward ─ backward ──────│

All ranks leave the step together, so a stopwatch shows the same time on each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradsync.cli.bench.hardware import cores
from gradsync.cli.bench.other_processes import OtherProcesses
from gradsync.cli.demo.story.corpus import read_library
from gradsync.cli.demo.story.demo_model import DemoShape, build, loss_of
from gradsync.cli.demo.story.train_variants import LEARNING_RATE, rank_batch
from gradsync.cli.local_ranks import advance
from gradsync.engine.attach import attach
from gradsync.report.summary import summarize
from gradsync.report.table import Table, tabulate
from gradsync.trace.reader import read_run

SLOWED_S = 0.03
TRACE = "run"  # in the folder of the ranks
_PHASES = ("input", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class RankTimes:
    """A rank's median step, in milliseconds."""

    rank: int
    step_ms: float
    exposed_ms: float
    phases_ms: dict[str, float]


@dataclass(frozen=True)
class SlowInput:
    """The result of training with a slow input."""

    slowed: int
    slowed_ms: float
    steps: int
    ranks: list[RankTimes]
    verdict: str
    blame: list[str]
    busy_cores_of_others: float = 0.0
    cores: int = 1

    def as_json(self) -> dict[str, Any]:
        return {"command": "demo", **asdict(self)}


def train_slowly(slowed: int, shape: DemoShape, steps: int, folder: str) -> float:
    """Train with a trace, the rank `slowed` with a sleep in its input. For every rank of a group.

    On rank 0 it returns how many cores other processes kept busy meanwhile.
    """
    model = build(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    sync = attach(model, optimizer, trace=os.path.join(folder, TRACE))
    others = OtherProcesses()
    for batch in sync.data(_batches(slowed, shape, steps)):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            advance(folder)
    busy_cores = others.cores()
    sync.detach()
    return busy_cores


def read_slow_input(folder: Path, slowed: int, busy_cores: float = 0.0) -> SlowInput:
    """Return what the traces say."""
    run = read_run(folder)
    table, summary = tabulate(run), summarize(run)
    ranks = [_times(table, rank) for rank in table.ranks]
    blame = [str(each.text) for each in summary.blame]
    return SlowInput(slowed, 1e3 * SLOWED_S, len(table.steps), ranks, summary.verdict, blame, busy_cores, cores())


def _batches(slowed: int, shape: DemoShape, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    text, rank = read_library(), dist.get_rank()
    for step in range(steps):
        if rank == slowed:
            time.sleep(SLOWED_S)
        yield rank_batch(text, shape, step, rank)


def _times(table: Table, rank: int) -> RankTimes:
    cells = [cell for step in table.judged() if (cell := table.cell(step, rank)) is not None]
    phases = {name: 1e3 * median(cell.seconds(name) for cell in cells) for name in _PHASES}
    step_ms, exposed_ms = (1e3 * median(times) for times in zip(*((c.step_s, c.exposed_s) for c in cells), strict=True))
    return RankTimes(rank, step_ms, exposed_ms, phases)
