"""`gradsync doctor`: before a run, what is wrong here and the command that mends it; after one, what happened first."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gradsync.cli.doctor.after_crash import tell_run
from gradsync.cli.doctor.all_checks import examine
from gradsync.cli.doctor.finding import Finding, Grade
from gradsync.cli.doctor.gather import gather
from gradsync.cli.doctor.measured_links import Measured
from gradsync.cli.doctor.meet_ranks import measure_here, measure_together, share
from gradsync.cli.doctor.rank_facts import Facts
from gradsync.cli.doctor.text import as_json, tell
from gradsync.cli.shared import BadInput, Parser, whole_number, wide_console
from gradsync.errors import GradSyncError, LaunchError
from gradsync.launch.environment import Task, read_task

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


class Checkup(NamedTuple):
    """What a check-up gave."""

    findings: list[Finding]
    facts: Sequence[Facts]
    measured: Measured | None
    together: bool  # all ranks came


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `doctor` among the commands."""
    parser = commands.add_parser(
        "doctor",
        help="what is wrong here, before a run; what happened first, after one",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        checkup = _damaged(gather(os.environ, None), error)
    else:
        own = gather(os.environ, task)
        checkup = _alone(options, own) if task is None else _together(options, task, own)
        # Where the ranks did not meet, nobody else will say it on this host.
        if task is not None and task.rank and (checkup.together or task.local_rank):
            return 0  # anything else, and the launcher might end rank 0 before it has spoken
        if task is not None and not options.json:
            _show(checkup, machines=False)
            return 0  # the answer stays the last thing on the screen
    _show(checkup, options.json)
    return _code(checkup)


def _alone(options: argparse.Namespace, own: Facts) -> Checkup:
    if options.brief:
        return Checkup(examine([own], None), [own], None, True)
    try:
        measured = measure_here(options.ranks or _DEFAULT_RANKS, options.json)
    except GradSyncError as error:
        return Checkup(examine([own], None, _not_measured(error)), [own], None, True)
    return Checkup(examine([own], measured), [own], measured, True)


def _together(options: argparse.Namespace, task: Task, own: Facts) -> Checkup:
    if options.ranks not in (None, task.world_size):
        raise BadInput(
            f"gradsync doctor: --ranks {options.ranks}, but {task.launcher} started {task.world_size}: "
            "leave --ranks out"
        )
    try:
        facts = share(task, own)
    except LaunchError as error:
        return Checkup(examine([own], None, _apart(error)), [own], None, False)
    if options.brief:
        return Checkup(examine(facts, None), facts, None, True)
    try:
        measured = measure_together(options.json)
    except GradSyncError as error:
        return Checkup(examine(facts, None, _not_measured(error)), facts, None, True)
    return Checkup(examine(facts, measured), facts, measured, True)


def _damaged(own: Facts, error: LaunchError) -> Checkup:
    fix = "torchrun --nproc-per-node=2 --no-python gradsync doctor"
    finding = Finding(Grade.WRONG, "the launcher's environment does not say who this is", str(error), fix)
    return Checkup(examine([own], None, finding), [own], None, False)


def _apart(error: LaunchError) -> Finding:
    fix = "nc -zv $MASTER_ADDR $MASTER_PORT    # from every host, while rank 0 waits"
    return Finding(Grade.WRONG, "the ranks did not meet", str(error), fix)


def _not_measured(error: GradSyncError) -> Finding:
    """The last line that says something: ranks that failed bring their whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Finding(
        Grade.WRONG,
        "the ranks could not talk to each other",
        lines[-1] if lines else type(error).__name__,
        "env -u GLOO_SOCKET_IFNAME gradsync doctor    # and between hosts open the ports from 1024 on",
    )


def _show(checkup: Checkup, machines: bool) -> None:
    console = wide_console()
    if machines:
        console.out(json.dumps(as_json(checkup.findings, checkup.facts, checkup.measured), indent=1))
    else:
        tell(console, checkup.findings)


def _code(checkup: Checkup) -> int:
    return int(any(finding.grade == Grade.WRONG for finding in checkup.findings))
