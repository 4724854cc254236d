"""Ranks that the others wait for, again and again, and in what they are late.

A rank is blamed if it is late in at least half of the last 50 steps, and not by a machine's mood. For that, steps are
cut into ten windows; a rank's time in a window is its mean without the longest fifth, so that no single stall counts.
One of these must hold in at least half of the windows:

    one part  its input, optimizer, compression or the gaps between take twice as long as the others', which makes it
              late by a tenth of the step, and explains most of its lateness
    slow      its work before the collective takes more than 4/3 of the others' (a score below 0.75), and is late by
              three times what they differ among themselves
    steady    it is late by a tenth of the step and by four times what the others differ among themselves (this in
              nine of ten windows)

Any process may take a processor away for a second: where steps are short, the last two must hold for ten seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, variance
from typing import NamedTuple

from gradsync.report.lateness import PARTS, blamed, handing_over_s, low_median, own_parts, own_s
from gradsync.report.overhead import Overhead
from gradsync.report.table import Table
from gradsync.report.wording import advice, host_of, where, who
from gradsync.trace.lines import StepLine
from gradsync.trace.reader import RunTrace
from gradsync.units import show_seconds

NUM_STEPS = 50
FEWEST = 10  # steps to judge at all

_NUM_WINDOWS = 10
_LONG_S = 10.0
_MOST_STEPS = 1000
_SCORE = 0.75
_MATTERS = 0.1  # of the step
_LATE = 0.05  # of the step, for one step to be called late
_TWICE = 2.0
_MORE_THAN_NOISE = 3.0  # times what the others differ by: three ranks on two cores are never alike
_TIMES_NOISE = 4.0  # the same, for smaller differences
_MOSTLY = 0.6  # of its lateness
_ALONE = ("input", "optimizer", "encode", "other")  # parts that may be slow while computing is not

Row = Mapping[int, Mapping[str, float]]  # by rank: seconds by part, and "own" for all


class Blame(NamedTuple):
    """A rank that makes the others wait."""

    rank: int
    host: str
    phase: str  # one of lateness.PARTS, or lateness.COMPUTATION
    num_late: int  # of the last `num_steps`
    num_steps: int
    late_s: float  # as a rule, when it is late
    score: float  # the others' work before the collective / its own: 1 is in step, 0.5 takes twice as long
    share: float  # of the step that ranks lose by it, on the average
    text: str
    advice: str


def find_blame(run: RunTrace, table: Table, overhead: Overhead) -> list[Blame]:
    """Every rank that the others wait for as a rule, the worst first."""
    whole = [table.rows[step] for step in table.judged() if len(table.rows[step]) == len(table.ranks)]
    if len(whole) < FEWEST or len(table.ranks) < 2:
        return []
    rows: list[Row] = [_all_parts(row) for row in whole[-NUM_STEPS:]]
    windows = _windows(rows)
    long = _windows([{rank: {"own": own_s(cell)} for rank, cell in row.items()} for row in _long(whole)])
    found = [
        _blame(run, rank, rows, windows, overhead)
        for rank in table.ranks
        if 2 * len(_late(rank, rows, overhead.step_s)) >= len(rows)
        and (_has_odd_part(rank, windows, overhead.step_s) or _is_odd(rank, long, overhead.step_s))
    ]
    return sorted(found, key=lambda blame: -blame.share)


def _all_parts(row: Mapping[int, StepLine]) -> Row:
    return {rank: {**own_parts(cell), "own": own_s(cell)} for rank, cell in row.items()}


def _long(rows: Sequence[Mapping[int, StepLine]]) -> Sequence[Mapping[int, StepLine]]:
    """The last steps, as many as took ten seconds; at least 50, if there are."""
    elapsed_s = 0.0
    for count, row in enumerate(reversed(rows[-_MOST_STEPS:]), start=1):
        elapsed_s += max(cell.step_s for cell in row.values())
        if count >= NUM_STEPS and elapsed_s >= _LONG_S:
            return rows[-count:]
    return rows[-_MOST_STEPS:]


def _windows(rows: Sequence[Row]) -> list[Row]:
    count = min(_NUM_WINDOWS, len(rows) // 5)
    edges = [len(rows) * index // count for index in range(count + 1)]
    return [_window(rows[start:stop]) for start, stop in pairwise(edges)]


def _window(rows: Sequence[Row]) -> Row:
    """Each rank's usual times in a few steps: without its longest fifth, which anybody may have."""
    kept = len(rows) - -(-len(rows) // 5)
    few = {rank: sorted((row[rank] for row in rows), key=lambda parts: parts["own"])[:kept] for rank in rows[0]}
    return {rank: {name: fmean(parts[name] for parts in steps) for name in steps[0]} for rank, steps in few.items()}


def _usual(row: Row, rank: int, name: str) -> float:
    return low_median([parts[name] for other, parts in row.items() if other != rank])


def _excess(row: Row, rank: int, name: str = "own") -> float:
    return row[rank][name] - _usual(row, rank, name)


def _late(rank: int, rows: Sequence[Row], step_s: float) -> list[float]:
    """Return how late the rank is, in the steps in which it is."""
    return [excess for row in rows if (excess := _excess(row, rank)) > _LATE * step_s]


def _has_odd_part(rank: int, windows: Sequence[Row], step_s: float) -> bool:
    """Return whether one thing that a rank does takes far longer than on others."""
    return any(2 * sum(_stands_out(row, rank, name, step_s) for row in windows) >= len(windows) for name in _ALONE)


def _is_odd(rank: int, windows: Sequence[Row], step_s: float) -> bool:
    """Return whether all that a rank does together takes longer than the unsteadiness of a machine makes it."""
    restless_s = _unsteadiness(rank, windows)
    much = max(_MATTERS * step_s, _MORE_THAN_NOISE * restless_s)
    if 2 * sum(_score(row, rank) < _SCORE and _excess(row, rank) > much for row in windows) >= len(windows):
        return True
    least = max(_MATTERS * step_s, _TIMES_NOISE * restless_s)
    return len(windows[0]) > 2 and 10 * sum(_excess(row, rank) > least for row in windows) >= 9 * len(windows)


def _score(row: Row, rank: int) -> float:
    return _usual(row, rank, "own") / row[rank]["own"] if row[rank]["own"] else 1.0


def _stands_out(row: Row, rank: int, name: str, step_s: float) -> bool:
    excess = _excess(row, rank, name)
    least = max(_MATTERS * step_s, _MOSTLY * _excess(row, rank))
    return excess > least and row[rank][name] > _TWICE * _usual(row, rank, name)


def _unsteadiness(rank: int, windows: Sequence[Row]) -> float:
    """Return the standard deviation of the others; without those who are always late like this one."""
    others = [each for each in windows[0] if each != rank and not _always_late_too(each, rank, windows)]
    if len(others) < 2:
        return 0.0
    return fmean(variance([row[each]["own"] for each in others]) for row in windows) ** 0.5


def _always_late_too(other: int, rank: int, windows: Sequence[Row]) -> bool:
    late = sum(row[other]["own"] > row[rank]["own"] - _excess(row, rank) / 2 for row in windows)
    return 5 * late >= 4 * len(windows)


def _blame(run: RunTrace, rank: int, rows: Sequence[Row], windows: Sequence[Row], overhead: Overhead) -> Blame:
    late = _late(rank, rows, overhead.step_s)
    own = {name: _trimmed([row[rank][name] for row in rows]) for name in PARTS}
    usual = {name: _trimmed([_usual(row, rank, name) for row in rows]) for name in PARTS}
    phase, late_s = blamed(own, usual), median(late)
    recent = run.ranks[rank].steps[-NUM_STEPS:]
    exact = any(step.exact_input for step in recent[-1:])
    hands_over = 2 * sum(map(handing_over_s, recent)) > sum(own_parts(step)["other"] for step in recent)
    text = (
        f"{who(run, rank)} is late in {len(late)} of the last {len(rows)} steps, by {show_seconds(late_s)}, "
        f"{where(phase, exact, hands_over)}"
    )
    score = median(_score(row, rank) for row in windows)
    share = overhead.charged_s.get(rank, 0.0) / overhead.step_s
    todo = advice(phase, exact, hands_over, run.ranks[rank].run.source)
    return Blame(rank, host_of(run, rank), phase, len(late), len(rows), late_s, score, share, text, todo)


def _trimmed(values: Sequence[float]) -> float:
    """The mean without the longest and the shortest tenth."""
    cut = len(values) // 10
    return fmean(sorted(values)[cut : len(values) - cut])
