"""`gradsync doctor`: before a run, what is wrong here and the command that mends it; after one, what happened first."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from gradsync.cli.doctor.after_crash import tell_run
from gradsync.cli.doctor.all_checks import examine
from gradsync.cli.doctor.finding import Finding, Grade
from gradsync.cli.doctor.gather import gather
from gradsync.cli.doctor.measured_links import STAGES, MeasuredLinks, measure_links
from gradsync.cli.doctor.rank_facts import Facts, facts_of
from gradsync.cli.doctor.text import as_json, tell
from gradsync.cli.local_ranks import measure_alone, measure_as_rank
from gradsync.cli.shared import Parser, check_ranks, whole_number, wide_console
from gradsync.errors import GradSyncError, LaunchError
from gradsync.launch.environment import Task, read_task
from gradsync.launch.init import init
from gradsync.launch.rendezvous import Rendezvous

_BOUND_S = 120.0
_DEFAULT_RANKS, _MAX_RANKS = 2, 64

_DESCRIPTION = """\
Before a run: looks at versions, the C module, network interfaces, MTU, memory, processors, GPUs and environment
variables on every rank, measures the links and clocks between them, and says what is wrong with the command that
mends it. After a run: reads its traces and flight records, and says what happened first, and where.
Exit code 0: nothing is wrong; 1: something is; 2: bad input. Under a launcher 1 comes with --json only: torchrun would
print a traceback of its own below the answer.
"""

_EXAMPLE = """\
example:
  gradsync doctor                  this machine, measured with 2 ranks
  gradsync doctor --brief          the same without measuring
  gradsync doctor run_dir          what happened in the run that wrote its trace there

under a launcher, on one host or several, differences between ranks are found too; rank 0 prints:
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --no-python gradsync doctor
"""


class DoctorResult(NamedTuple):
    """The result of a check-up."""

    findings: list[Finding]
    facts: Sequence[Facts]
    measured: MeasuredLinks | None
    together: bool  # all ranks came


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `doctor` among the commands."""
    parser = commands.add_parser(
        "doctor",
        help="what is wrong here, before a run; what happened first, after one",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="RUN", help="the folder of a run's traces, to say what happened there")
    add("--ranks", type=whole_number(2, _MAX_RANKS), metavar="N", help=f"processes to measure with ({_DEFAULT_RANKS})")
    add("--brief", action="store_true", help="measure nothing")
    add("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.folder is not None:
        return tell_run(wide_console(), options.folder, options.json)
    try:
        task = read_task(os.environ, os.getppid())
    except LaunchError as error:
        what = "the launcher's environment does not say who this is"
        fix = "torchrun --nproc-per-node=2 --no-python gradsync doctor"
        checkup = _by_itself(gather(os.environ, None), what, error, fix)
    else:
        own = gather(os.environ, task)
        if task is None:
            terms = (measure_links, options.ranks or _DEFAULT_RANKS, len(STAGES), options.json, _BOUND_S)
            checkup = _examined([own], options.brief, lambda: measure_alone(*terms))
        else:
            checkup = _together(options, task, own)
        # Where the ranks did not meet, nobody else will say it on this host.
        if task is not None and task.rank and (checkup.together or task.local_rank):
            return 0  # anything else, and the launcher might end rank 0 before it has spoken
        if task is not None and not options.json:
            _show(checkup, machines=False)
            return 0  # the answer stays the last thing on the screen
    _show(checkup, options.json)
    return int(any(finding.grade == Grade.WRONG for finding in checkup.findings))


def _together(options: argparse.Namespace, task: Task, own: Facts) -> DoctorResult:
    check_ranks("doctor", options.ranks, task)
    try:
        facts = share(task, own)
    except LaunchError as error:
        fix = "nc -zv $MASTER_ADDR $MASTER_PORT    # from every host, while rank 0 waits"
        return _by_itself(own, "the ranks did not meet", error, fix)
    return _examined(facts, options.brief, lambda: measure_together(options.json))


def _examined(facts: list[Facts], brief: bool, measure: Callable[[], MeasuredLinks]) -> DoctorResult:
    try:
        measured = None if brief else measure()
    except GradSyncError as error:
        return DoctorResult(examine(facts, None, _not_measured(error)), facts, None, True)
    return DoctorResult(examine(facts, measured), facts, measured, True)


def _by_itself(own: Facts, what: str, error: LaunchError, fix: str) -> DoctorResult:
    """Return what a rank finds that does not know of the others."""
    return DoctorResult(examine([own], None, Finding(Grade.WRONG, what, str(error), fix)), [own], None, False)


def _not_measured(error: GradSyncError) -> Finding:
    """The last line that says something: ranks that failed bring their whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Finding(
        Grade.WRONG,
        "the ranks could not talk to each other",
        lines[-1] if lines else type(error).__name__,
        "env -u GLOO_SOCKET_IFNAME gradsync doctor    # and between hosts open the ports from 1024 on",
    )


def _show(checkup: DoctorResult, machines: bool) -> None:
    console = wide_console()
    if machines:
        console.out(json.dumps(as_json(checkup.findings, checkup.facts, checkup.measured), indent=1))
    else:
        tell(console, checkup.findings)


def share(task: Task, own: Facts) -> list[Facts]:
    """Every rank's facts, by rank, through the launcher's store before any group is made. `LaunchError` if some do not
    come."""
    rendezvous = Rendezvous(task, timedelta(seconds=_BOUND_S))
    records = rendezvous.exchange("doctor", own.record())
    rendezvous.finish("doctor")
    return [facts_of(record) if rank != task.rank else own for rank, record in enumerate(records)]


def measure_together(quiet: bool) -> MeasuredLinks:
    """The links between a launcher's ranks, of which this process is one."""
    init("gloo", timeout=_BOUND_S)
    try:
        return measure_as_rank(measure_links, len(STAGES), quiet)
    finally:
        dist.destroy_process_group()
