"""A run's steps by number and rank: what every analysis starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gradsync.trace.lines import StepLine
from gradsync.trace.reader import RankTrace, RunTrace


@dataclass(frozen=True)
class Table:
    """Steps × ranks; a cell is empty where a rank wrote nothing."""

    ranks: list[int]
    steps: list[int]  # rising
    first: int | None  # the run's first step, which is different: compiling, allocating, laying out buckets
    rows: dict[int, dict[int, StepLine]] = field(repr=False)  # by step, then by rank

    def cell(self, step: int, rank: int) -> StepLine | None:
        """Return what one rank wrote of one step."""
        return self.rows.get(step, {}).get(rank)

    def judged(self) -> list[int]:
        """Steps that say how training goes: not the first, and none that was dropped."""
        return [
            step for step in self.steps if step != self.first and all(cell.counts for cell in self.rows[step].values())
        ]

    def after(self, step: int) -> Table:
        """Return what came after that step: none of it is a first one."""
        kept = [each for each in self.steps if each > step]
        return Table(self.ranks, kept, None, {each: self.rows[each] for each in kept})

    def column(self, rank: int) -> Iterator[StepLine]:
        """One rank's steps, in order."""
        return (row[rank] for step in self.steps if rank in (row := self.rows[step]))


def tabulate(run: RunTrace, last: int | None = None) -> Table:
    """All steps of a run, or its last few."""
    rows: dict[int, dict[int, StepLine]] = {}
    for rank, trace in run.ranks.items():
        for step in _latest(trace):
            rows.setdefault(step.step, {})[rank] = step
    steps = sorted(rows)
    kept = steps if last is None else steps[max(0, len(steps) - last) :]
    first = steps[0] if len(steps) > 1 else None
    return Table(sorted(run.ranks), kept, first, {step: rows[step] for step in kept})


def _latest(trace: RankTrace) -> Sequence[StepLine]:
    """The steps since a run last began in this folder: there, their numbers fall back."""
    steps = trace.steps
    begin = 0
    for index in range(len(steps) - 1, 0, -1):
        if steps[index].step <= steps[index - 1].step:
            begin = index
            break
    return [step for step in steps[begin:] if step.step_s > 0]
