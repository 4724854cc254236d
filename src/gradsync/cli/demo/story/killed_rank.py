"""A rank is killed in the middle of a step: what do the others say, and how soon?

    rank 1   forward ─ writes the time ─ SIGKILL
    rank 0   forward ─ backward ········ waits ······ error ─ writes the time and the message

What survivors report is written to files: after a failed synchronization nothing else is certain to arrive.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsync.cli.demo.story.corpus import read_library
from gradsync.cli.demo.story.demo_model import DemoShape, build, loss_of
from gradsync.cli.demo.story.train_variants import DDP, GRADSYNC, LEARNING_RATE, rank_batch
from gradsync.cli.local_ranks import advance
from gradsync.engine.attach import attach
from gradsync.errors import GradSyncError
from gradsync.launch.spawn import RankPool

KILL_STEP = 5
_LIMIT_S = 45.0  # for the start of the ranks, the training and the survivors' answer


@dataclass(frozen=True)
class SurvivorReport:
    """The report of one survivor; no error: it said nothing for so many seconds, and still waits."""

    rank: int
    error: str | None
    message: str
    seconds: float
    names_killed_rank: bool


@dataclass(frozen=True)
class RankDeath:
    """The death of a rank, as one arm took it."""

    arm: str
    killed: int
    fates: list[SurvivorReport]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """Say what this death comes to, in a line."""
        named = sum(report.names_killed_rank for report in self.fates)
        last = max(report.seconds for report in self.fates)
        told = "every survivor knew" if all(report.error for report in self.fates) else "not every survivor knew"
        return f"{told} after {last:.2f} s; {named} of {len(self.fates)} say that it was rank {self.killed}"


def train_until_death(arm: str, killed: int, shape: DemoShape, folder: str) -> None:
    """Train; in step `KILL_STEP` the rank `killed` dies after its forward. For every rank of a group."""
    text, plain = read_library(), build(shape)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    if arm == GRADSYNC:
        attach(plain, optimizer)
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True) if arm == DDP else plain
    rank = dist.get_rank()
    for step in range(KILL_STEP + 2):
        try:
            loss = loss_of(model, rank_batch(text, shape, step, rank))
            if (rank, step) == (killed, KILL_STEP):
                _die(Path(folder, arm))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        except Exception as error:
            _write(Path(folder, arm), f"report-{rank}", _name(error), str(error))
            raise
        if rank == (killed + 1) % dist.get_world_size():
            advance(folder)


def watch_death(pool: RankPool, arm: str, killed: int, shape: DemoShape, folder: str) -> RankDeath:
    """Let a rank die, on the ranks of this pool, and read what they left."""
    left = Path(folder) / arm
    left.mkdir()
    pool.pids()  # started before the clock
    outcomes = pool.outcomes(train_until_death, arm, killed, shape, folder, timeout=_LIMIT_S)
    if not Path(left, "killed").exists():
        ends = "\n".join(f"--- rank {rank} ---\n{outcome.text}" for rank, outcome in enumerate(outcomes))
        raise GradSyncError(f"with {arm} the ranks ended before rank {killed} was killed:\n{ends}")
    died_at = _read(left, "killed")["at"]
    survivors = [rank for rank in range(pool.ranks) if rank != killed]
    return RankDeath(arm, killed, [_survivor_report(left, rank, killed, died_at) for rank in survivors])


def _die(folder: Path) -> None:
    _write(folder, "killed", None, "")
    os.kill(os.getpid(), signal.SIGKILL)


def _survivor_report(folder: Path, rank: int, killed: int, died_at: float) -> SurvivorReport:
    try:
        said = _read(folder, f"report-{rank}")
    except FileNotFoundError:
        return SurvivorReport(rank, None, "nothing, it still waits", time.monotonic() - died_at, False)
    return SurvivorReport(rank, said["error"], said["message"], said["at"] - died_at, names(killed, said["message"]))


def names(rank: int, message: str) -> bool:
    """Return whether a message says that something happened to a rank; `[rank 0/2 ...]` only says who speaks.

    >>> names(1, "[rank 0/2 step 5] rank 1 (pid 77) died"), names(0, "[rank 0/2 step 5] rank 1 (pid 77) died")
    (True, False)
    """
    return re.search(rf"(?<!\[)\brank {rank}\b", message) is not None


def _name(error: Exception) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _write(folder: Path, name: str, error: str | None, message: str) -> None:
    # CLOCK_MONOTONIC is one clock for all processes of a machine.
    report = {"at": time.monotonic(), "error": error, "message": message}
    Path(folder, name).write_text(json.dumps(report))


def _read(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads(Path(folder, name).read_text()))
