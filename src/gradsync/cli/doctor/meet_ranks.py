"""How the ranks of a check-up come together: by the launcher's store, where facts are exchanged as JSON, before any
group is made; then, to measure, in a group of gloo. Alone: a few processes of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from gradsync.cli.doctor.measured_links import STAGES, Measured, measure_links
from gradsync.cli.doctor.rank_facts import Facts, facts_of
from gradsync.cli.shared import advance, follow
from gradsync.launch.environment import Task
from gradsync.launch.init import init
from gradsync.launch.rendezvous import Rendezvous
from gradsync.launch.spawn import RankPool

_BOUND_S = 120.0


def share(task: Task, own: Facts) -> list[Facts]:
    """Every rank's facts, by rank. `LaunchError` if some do not come."""
    rendezvous = Rendezvous(task, timedelta(seconds=_BOUND_S))
    records = rendezvous.exchange("doctor", own.record())
    rendezvous.farewell("doctor")
    return [facts_of(record) if rank != task.rank else own for rank, record in enumerate(records)]


def measure_alone(ranks: int, quiet: bool) -> Measured:
    """On processes of this machine."""
    with _progress(quiet) as path, RankPool(ranks, threads=1) as pool:
        measured = pool.run(_take_part, path, timeout=_BOUND_S)[0]
    assert isinstance(measured, Measured)
    return measured


def measure_together(task: Task, quiet: bool) -> Measured:
    """As one of a launcher's ranks."""
    init("gloo", timeout=_BOUND_S)
    try:
        if task.rank:
            return _take_part("")
        with _progress(quiet) as path:
            return _take_part(path)
    finally:
        dist.destroy_process_group()


def _take_part(path: str) -> Measured:
    world = dist.group.WORLD
    assert world is not None
    return measure_links(world, partial(_note, path if dist.get_rank() == 0 else ""))


def _note(path: str, stage: str) -> None:
    if path:
        advance(path)


@contextmanager
def _progress(quiet: bool) -> Iterator[str]:
    """A file for it, gone afterwards; while it grows, progress is shown."""
    with tempfile.TemporaryDirectory(prefix="gradsync-doctor-") as folder:
        path = os.path.join(folder, "progress")
        with follow(path, len(STAGES), "measuring", quiet):
            yield path
