"""The ranks that were late, by how much and in what: from each rank's own work before it had to wait.

    rank 0  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░░░░░░│      ▒ own work    ░ wait
    rank 1  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░░░░░│
    rank 2  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░│      late by the difference to the median of the others

All ranks leave a synchronization at the same moment, so durations on each rank's own clock compare without any
alignment of clocks. What remains of the wait when the last rank is there is the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradsync.report.table import Table
from gradsync.trace.lines import StepLine

PARTS = ("input", "forward", "backward", "optimizer", "encode", "other")
COMPUTATION = "computation"  # forward, backward and optimizer, slower in proportion

_COMPUTING = ("forward", "backward", "optimizer")
_SLOWER = 0.1  # a part that takes this much longer is slower
_PROPORTION = 0.3  # of the part of the lateness that it would have if all were slower alike
_NOTABLE = 0.1  # a part this small beside the others proves nothing about the processor
_MOSTLY = 0.6  # of the lateness


class LateRank(NamedTuple):
    """One rank in one step."""

    step: int
    rank: int
    late_s: float  # negative: early
    phase: str | None  # one of PARTS, or COMPUTATION; None where it was not late


def lateness(table: Table) -> dict[tuple[int, int], LateRank]:
    """Late ranks by (step, rank), of all steps that at least two ranks wrote."""
    found = {}
    for step in table.steps:
        row = table.rows[step]
        if len(row) < 2:
            continue
        parts = {rank: own_parts(cell) for rank, cell in row.items()}
        owns = {rank: own_s(cell) for rank, cell in row.items()}
        usual = medians_of_others(owns)
        usual_parts = {name: medians_of_others({rank: parts[rank][name] for rank in row}) for name in PARTS}
        for rank in row:
            late_s = owns[rank] - usual[rank]
            phase = None
            if late_s > 0:
                phase = blamed(parts[rank], {name: medians[rank] for name, medians in usual_parts.items()})
            found[step, rank] = LateRank(step, rank, late_s, phase)
    return found


def own_s(step: StepLine) -> float:
    """A rank's own work, within the step: a file may say anything."""
    return min(max(0.0, step.own_s), step.step_s)


def own_parts(step: StepLine) -> dict[str, float]:
    """A rank's own work by what it was; compressing happens inside backward, what is in no phase is other.

    >>> from gradsync.trace.lines import StepPart
    >>> parts = [StepPart("input", 0, 1), StepPart("backward", 2, 6), StepPart("wait", 6, 9)]
    >>> step = StepLine(1, 0.0, 9.0, parts, encode_s=1.0)
    >>> own_parts(step)
    {'input': 1.0, 'forward': 0.0, 'backward': 3.0, 'optimizer': 0.0, 'encode': 1.0, 'other': 1.0}
    """
    parts = dict.fromkeys(PARTS, 0.0)
    other = own_s(step)
    for name, start, stop in step.phases:
        if name in parts and stop > start:
            parts[name] += stop - start
            other -= stop - start
    parts["encode"] = min(max(0.0, step.encode_s), parts["backward"])
    parts["backward"] -= parts["encode"]
    parts["other"] = max(0.0, other)
    return parts


def handing_over_s(step: StepLine) -> float:
    """The time between backward and the wait that is in no phase: gradients are packed, and handed over.

    >>> from gradsync.trace.lines import StepPart
    >>> handing_over_s(StepLine(1, 0.0, 9.0, [StepPart("backward", 2, 6), StepPart("wait", 7.5, 9)]))
    1.5
    """
    backwards = [phase.stop for phase in step.phases if phase.name == "backward"]
    waits = [phase.start for phase in step.phases if phase.name == "wait"]
    return max(0.0, waits[-1] - backwards[-1]) if backwards and waits else 0.0


def blamed(own: Mapping[str, float], usual: Mapping[str, float]) -> str:
    """The part with the largest excess; all of the computation, if all of it is slower in proportion.

    >>> usual = {"input": 3.0, "forward": 10.0, "backward": 20.0, "optimizer": 2.0, "encode": 0.0, "other": 0.0}
    >>> blamed(usual | {"input": 30.0}, usual), blamed(usual | {"forward": 20.0, "backward": 40.0}, usual)
    ('input', 'computation')
    """
    excess = {name: own[name] - usual[name] for name in PARTS}
    most = max(PARTS, key=excess.__getitem__)
    # Input may be a processor's work too: if it is slower most of all, then in proportion with the rest or for itself.
    told = [*_COMPUTING, most] if most == "input" else _COMPUTING
    base = sum(usual[name] for name in told)
    told = [name for name in told if usual[name] > _NOTABLE * base]
    if most not in told or len(told) < 2:
        return most
    base, late_s = sum(usual[name] for name in told), sum(excess[name] for name in told)
    mostly = late_s >= _MOSTLY * sum(max(0.0, each) for each in excess.values())
    # Not exactly alike: while others wait, a processor that is shared has more time for who is late.
    alike = all(excess[name] > usual[name] * max(_SLOWER, _PROPORTION * late_s / base) for name in told)
    return COMPUTATION if mostly and alike else most


def low_median(values: Sequence[float]) -> float:
    """The median, the lower one of two: of two others one may be late as well.

    >>> low_median([5.0, 1.0]), low_median([9.0, 1.0, 2.0])
    (1.0, 2.0)
    """
    return sorted(values)[(len(values) - 1) // 2]


def medians_of_others(values: Mapping[int, float]) -> dict[int, float]:
    """`low_median` of everybody else's, for each.

    >>> medians_of_others({0: 1.0, 1: 5.0, 2: 9.0})
    {0: 5.0, 1: 1.0, 2: 1.0}
    """
    ordered = sorted((value, rank) for rank, value in values.items())
    middle = (len(ordered) - 2) // 2
    return {rank: ordered[middle + (place <= middle)][0] for place, (_, rank) in enumerate(ordered)}
