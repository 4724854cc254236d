"""How the ranks of a check-up come together: by the launcher's store, where facts are exchanged as JSON, before any
group is made; then, to measure, in a group of gloo. Alone: a few processes of this machine."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from gradsync.cli.doctor.measured_links import STAGES, MeasuredLinks, measure_links
from gradsync.cli.doctor.rank_facts import Facts, facts_of
from gradsync.cli.local_ranks import measure_alone, measure_as_rank
from gradsync.launch.environment import Task
from gradsync.launch.init import init
from gradsync.launch.rendezvous import Rendezvous

_BOUND_S = 120.0


def share(task: Task, own: Facts) -> list[Facts]:
    """Every rank's facts, by rank. `LaunchError` if some do not come."""
    rendezvous = Rendezvous(task, timedelta(seconds=_BOUND_S))
    records = rendezvous.exchange("doctor", own.record())
    rendezvous.finish("doctor")
    return [facts_of(record) if rank != task.rank else own for rank, record in enumerate(records)]


def measure_here(ranks: int, quiet: bool) -> MeasuredLinks:
    """The links between processes of this machine."""
    return measure_alone(measure_links, ranks, len(STAGES), quiet, _BOUND_S)


def measure_together(quiet: bool) -> MeasuredLinks:
    """The links between a launcher's ranks, of which this process is one."""
    init("gloo", timeout=_BOUND_S)
    try:
        return measure_as_rank(measure_links, len(STAGES), quiet)
    finally:
        dist.destroy_process_group()
