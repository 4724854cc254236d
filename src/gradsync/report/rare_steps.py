"""Warnings of steps that are unlike the others: what comes every so many steps, and long ones without an order."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from gradsync.report.facts import ReportWarning
from gradsync.report.overhead import Overhead
from gradsync.report.periodic_steps import PeriodicSteps, find_periodic_steps
from gradsync.report.slow_ranks import FEWEST
from gradsync.report.table import Table
from gradsync.report.wording import listed, show_share
from gradsync.units import show_seconds

_LONG = 3.0  # times the usual step
_MATTERS = 0.1  # of all time
_MOST = 3

_WHERE = {
    "input": "in input",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer",
    "encode": "in compressing gradients",
    "other": "between the phases",
}


def warn_of_times(table: Table, overhead: Overhead) -> Iterable[ReportWarning]:
    """Warn of what comes regularly, then of what does not."""
    regular = find_periodic_steps(table)
    yield from (_periodic(one) for one in regular[:_MOST])
    yield from _long_steps(table, overhead, {step for one in regular for step in one.steps})


def _periodic(one: PeriodicSteps) -> ReportWarning:
    before_forward = one.part == "input" and not one.exact_input
    where = "between the optimizer and the next forward" if before_forward else _WHERE[one.part]
    who = "all ranks take" if one.everybody else f"{listed(one.ranks)} take{'s' * (len(one.ranks) == 1)}"
    waiting = "" if one.everybody else ", and the others wait for it"
    return ReportWarning(
        f"Every {one.every} steps {who} {show_seconds(one.more_s)} longer, {where}{waiting}: "
        f"{show_share(one.share)} of all time.",
        _advice(one, before_forward),
    )


def _advice(one: PeriodicSteps, before_forward: bool) -> str:
    if one.part == "input" and not before_forward:
        return "Batches come slowly then: a loader that begins anew (persistent_workers=True keeps its workers)?"
    if not (before_forward or one.part == "other"):
        return "Look at what that part does in these steps that it does not do in others."
    what = "That is how validation, a checkpoint or a new epoch looks"
    return (
        f"{what}: do it less often." if one.everybody else f"{what}: give every rank a part of it, or do it less often."
    )


def _long_steps(table: Table, overhead: Overhead, known: set[int]) -> Iterable[ReportWarning]:
    """A tenth of the run in few steps: no usual step shows them, and no rank is late in half of all."""
    steps = table.judged()
    lengths = {step: median(cell.step_s for cell in table.rows[step].values()) for step in steps}
    long = [
        length - overhead.step_s for step, length in lengths.items() if step not in known and _is_long(length, overhead)
    ]
    share = sum(long) / sum(lengths.values()) if lengths else 0.0
    if not overhead.seldom and len(steps) >= FEWEST and share > _MATTERS:
        more = " more" if known else ""
        yield ReportWarning(
            f"{len(long)}{more} of {len(steps)} steps take more than {_LONG:.0f} times as long as usual, "
            f"{show_share(share)} of all time.",
            "Numbers here are of usual steps; look at these in the page's heat map or with --perfetto: checkpoints, "
            "evaluation and garbage collection are what it mostly is.",
        )


def _is_long(length: float, overhead: Overhead) -> bool:
    return length > _LONG * overhead.step_s
