"""The cost of synchronization in a usual step, and its reasons: waiting for late ranks, or the network.

    rank 0  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░░░░▓▓▓│      ▒ own work    ░ somebody is late    ▓ network
    rank 1  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░▓▓▓│
    rank 2  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▓▓▓│
                          ↑ here rank 0 waits for 1 and 2, then 0 and 1 for 2: each is charged its part

Means over the middle half of the steps, by their length: no single long step moves them, and parts still add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gradsync.report.lateness import own_s
from gradsync.report.table import Table
from gradsync.trace.lines import StepLine

_SELDOM = 0.2  # of the steps without any communication: then it is not every step that synchronizes


@dataclass(frozen=True)
class Overhead:
    """A usual step, as a mean over ranks; seconds."""

    num_steps: int  # judged
    step_s: float
    own_s: float  # computing
    exposed_s: float  # nothing to compute: waiting, and the two that follow
    waiting_s: float  # of it, for ranks that were not ready
    network_s: float  # the rest
    charged_s: dict[int, float]  # of the waiting, by the rank that was waited for
    comm_s: float | None  # collectives under way, as the last rank saw it: without its waiting for others
    nbytes: float
    raw_nbytes: float
    sent_nbytes: float
    encode_s: float
    decode_s: float
    seldom: bool  # not every step synchronizes

    @property
    def share(self) -> float:
        """The share of the step that synchronization takes."""
        return self.exposed_s / self.step_s

    @property
    def overlap(self) -> float | None:
        """The part that hides of what can hide behind computing: 1 is the ideal step, max(computing, communication)."""
        if not self.comm_s or not self.own_s:
            return None
        hidden = (self.comm_s - self.network_s) / min(self.comm_s, self.own_s)
        return min(max(hidden, 0.0), 1.0)

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes that a rank puts on the network, per second of communication."""
        return self.sent_nbytes / self.comm_s if self.comm_s and self.sent_nbytes else None


def measure(table: Table) -> Overhead | None:
    """The overhead of a run's usual step; None if it has none."""
    judged = table.judged()
    if not judged:
        return None
    rows = [table.rows[step] for step in judged]
    seldom = _is_seldom(rows)
    usual = rows if seldom else middle_half(rows)
    splits = [_split(row) for row in usual]
    charged = {rank: fmean(charges.get(rank, 0.0) for _, charges in splits) for rank in table.ranks}
    cells = [cell for row in usual for cell in row.values()]
    # A mean of means, so that a step weighs the same whether all its ranks or only some have written it.
    step_s, exposed_s, computing_s = (
        fmean(fmean(part(cell) for cell in row.values()) for row in usual)
        for part in (lambda cell: cell.step_s, exposed, own_s)
    )
    waiting_s = min(exposed_s, fmean(waited for waited, _ in splits))
    return Overhead(
        num_steps=len(judged),
        step_s=step_s,
        own_s=computing_s,
        exposed_s=exposed_s,
        waiting_s=waiting_s,
        network_s=exposed_s - waiting_s,
        charged_s=charged,
        comm_s=fmean(min(cell.comm_s for cell in row.values()) for row in usual) or None,
        nbytes=fmean(cell.nbytes for cell in cells),
        raw_nbytes=fmean(cell.raw_nbytes for cell in cells),
        sent_nbytes=fmean(cell.sent_nbytes for cell in cells),
        encode_s=fmean(cell.encode_s for cell in cells),
        decode_s=fmean(cell.decode_s for cell in cells),
        seldom=seldom,
    )


def exposed(cell: StepLine) -> float:
    """Return how long a rank waited with nothing to compute, within the step: a file may say anything."""
    return min(max(0.0, cell.exposed_s), cell.step_s)


def middle_half(rows: Sequence[Mapping[int, StepLine]]) -> list[Mapping[int, StepLine]]:
    """Rows of the middle half, by the length of the step."""
    ordered = sorted(rows, key=lambda row: median(cell.step_s for cell in row.values()))
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def _split(row: Mapping[int, StepLine]) -> tuple[float, dict[int, float]]:
    """Return how long ranks waited for others on the average in one step, and for whom."""
    ready = sorted((own_s(cell), rank) for rank, cell in row.items())
    charges = dict.fromkeys(row, 0.0)
    total = 0.0
    for index in range(1, len(ready)):
        until, since = ready[index][0], ready[index - 1][0]
        # Ranks before `index` wait from `since` to `until`, but nobody longer than it was exposed.
        waited = sum(min(until - since, max(0.0, exposed(row[rank]) - (since - own))) for own, rank in ready[:index])
        total += waited
        for _, rank in ready[index:]:
            charges[rank] += waited / (len(ready) - index) / len(row)
    return total / len(row), charges


def _is_seldom(rows: Sequence[Mapping[int, StepLine]]) -> bool:
    """Return whether many steps, but not all, have nothing to do with others."""
    idle = sum(all(not cell.comm_s and not cell.exposed_s and not cell.nbytes for cell in row.values()) for row in rows)
    return _SELDOM * len(rows) <= idle < len(rows)
