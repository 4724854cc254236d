"""The steps that come back every so many: a rank, or all, take longer in them, and in the same part of the step.

rank 0   ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒▒▒▒▒▒▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒▒▒▒▒▒▒▒▒ ▒▒▒      every 4 steps
rank 1   ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒░░░░░░░░ ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒░░░░░░░░ ▒▒▒      it waits

No rank is late as a rule, and no usual step shows it. It is called regular only if nearly every step of that distance
is longer, nearly no other, and nearly always by the same part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from gradsync.report.lateness import PARTS, own_parts, own_s
from gradsync.report.table import Table
from gradsync.trace.lines import StepLine

_FEWEST = 3  # times that it must have come
_LONGER = (0.5, 1.0, 2.0, 4.0, 8.0)  # usual steps: less is a machine's mood, and what is that differs
_NEARLY = 0.8
_MOSTLY = 0.6
_SELDOM = 0.5  # of all steps: more is no exception
_MATTERS = 0.02  # of all time


class PeriodicSteps(NamedTuple):
    """Something that takes long every so many steps."""

    ranks: list[int]  # that do it
    everybody: bool
    every: int
    steps: list[int]
    more_s: float  # than usual, as a rule
    part: str  # one of lateness.PARTS
    exact_input: bool  # whether input is what the loader took, and nothing else
    share: float  # of all time


def find_periodic_steps(table: Table) -> list[PeriodicSteps]:
    """The dearest first; ranks that do the same in the same steps together."""
    judged = table.judged()
    if len(judged) < 2 * _FEWEST:
        return []
    lengths = {step: median(cell.step_s for cell in table.rows[step].values()) for step in judged}
    found: dict[tuple[int, int, str], list[PeriodicSteps]] = {}
    for rank in table.ranks:
        cells = {step: cell for step in judged if (cell := table.cell(step, rank)) is not None}
        if (one := _of_rank(rank, cells, lengths)) is not None:
            found.setdefault((one.every, one.steps[0] % one.every, one.part), []).append(one)
    together = [_together(group, len(table.ranks)) for group in found.values()]
    return sorted((each for each in together if each.share > _MATTERS), key=lambda each: -each.share)


def _of_rank(rank: int, cells: Mapping[int, StepLine], lengths: Mapping[int, float]) -> PeriodicSteps | None:
    if len(cells) < 2 * _FEWEST:
        return None
    owns = {step: own_s(cell) for step, cell in cells.items()}
    usual_s = median(owns.values())
    step_s = median(lengths.values())
    tries = ([step for step, own in owns.items() if own > usual_s + times * step_s] for times in _LONGER)
    distance = next((found for odd in tries if (found := _distance(odd, list(cells))) is not None), None)
    if distance is None:
        return None
    every, odd = distance
    parts = {step: own_parts(cell) for step, cell in cells.items()}
    usual = {name: median(each[name] for each in parts.values()) for name in PARTS}
    most = Counter(max(PARTS, key=lambda name: parts[step][name] - usual[name]) for step in odd).most_common(1)[0]
    if most[1] < _NEARLY * len(odd):
        return None
    more_s = median(owns[step] - usual_s for step in odd)
    share = sum(owns[step] - usual_s for step in odd) / sum(lengths.values())
    exact = all(cells[step].exact_input for step in odd)
    return PeriodicSteps([rank], False, every, odd, more_s, most[0], exact, share)


def _distance(odd: Sequence[int], steps: Sequence[int]) -> tuple[int, list[int]] | None:
    """Return how far apart the odd steps are, and which of them are; None if they are not regular.

    >>> _distance([9, 19, 29, 39], range(45)), _distance([9, 19, 22, 39], range(45)), _distance([9, 19], range(45))
    ((10, [9, 19, 29, 39]), None, None)
    >>> _distance([9, 19, 29], range(100))  # and then no more
    """
    if len(odd) < _FEWEST or len(odd) > _SELDOM * len(steps):
        return None
    every = Counter(later - before for before, later in pairwise(odd)).most_common(1)[0][0]
    place = Counter(step % every for step in odd).most_common(1)[0][0]
    here = [step for step in odd if step % every == place]
    due = sum(step % every == place for step in steps)
    regular = every > 1 and len(here) >= max(_FEWEST, _NEARLY * due, _MOSTLY * len(odd))
    return (every, here) if regular else None


def _together(group: Sequence[PeriodicSteps], num_ranks: int) -> PeriodicSteps:
    """Join what several ranks do in the same steps: it takes its time once."""
    longest = max(group, key=lambda one: one.share)
    ranks = [rank for one in group for rank in one.ranks]
    return longest._replace(ranks=ranks, everybody=len(ranks) == num_ranks)
