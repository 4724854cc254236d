"""The last that is known of each rank, from its flight record and its lines: its step, what it did, when, its end.

Times are put on rank 0's clock: by the clock lines, else, between hosts, by the wall clock in the headers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gradsync.trace.flight import FlightEntry, Moment
from gradsync.trace.lines import Error
from gradsync.trace.reader import RankTrace, RunTrace

_NAMES_SHOWN = 3
_MOST_NAMED = 64  # ranks, by one error
_LAST_WORDS = (Moment.FAILED, Moment.LEFT)
_WAITS = (Moment.COMPUTED, Moment.WAITING, Moment.BUCKET_CAME)
_DOING = {
    Moment.ATTACHED: "it had attached and not begun a step",
    Moment.FORWARD: "it was in its forward",
    Moment.BACKWARD: "it was in its backward",
    Moment.BUCKET_LEFT: "it was in its backward and had sent {bucket}",
    Moment.COMPUTED: "it had computed all its gradients and waited for the others'",
    Moment.WAITING: "it waited for {bucket}",
    Moment.BUCKET_CAME: "it had just got {bucket}",
    Moment.AVERAGED: "it had got all averages and not begun its optimizer",
    Moment.OPTIMIZER: "it was in its optimizer",
    Moment.STEPPED: "it was between its optimizer and its forward (input, logging)",
    Moment.INPUT: "it was in its input",
}


class LastSeen(NamedTuple):
    """One rank, when it was last seen."""

    rank: int
    host: str
    pid: int
    step: int | None
    at: float | None  # on rank 0's clock
    failed_at: float | None  # when it raised, on the same
    waits: bool  # for others
    bucket: int | None
    doing: str  # as in "it waited for bucket 0 (2.bias, 2.weight)"
    ended: str | None  # detach or exit: it left in good order
    error: Error | None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def silent(self) -> bool:
        """True if the rank neither left nor said what went wrong."""
        return self.ended is None and self.error is None


def last_seen(run: RunTrace) -> dict[int, LastSeen]:
    """Every rank whose file is here."""
    return {rank: seen_at(run, rank) for rank in run.ranks}


def seen_at(run: RunTrace, rank: int, until: float = math.inf) -> LastSeen:
    """One rank, as it was then, on rank 0's clock; its error and its end are told whenever they came."""
    trace, shift = run.ranks[rank], shift_of(run, rank)
    flight = [entry for entry in trace.flight if math.isfinite(entry.at) and abs(entry.at) < 1e15]
    acts = [entry for entry in flight if entry.moment not in _LAST_WORDS and entry.at + shift <= until]
    failures = [entry.at + shift for entry in flight if entry.moment == Moment.FAILED]
    last = acts[-1] if acts else None
    step, at = _of_entry(last) if last is not None else _of_lines(trace)
    return LastSeen(
        rank=trace.run.rank,
        host=trace.run.host,
        pid=trace.run.pid,
        step=step,
        at=None if at is None else at + shift,
        failed_at=failures[0] if failures else None,
        waits=last is not None and last.moment in _WAITS,
        bucket=None if last is None else last.bucket,
        doing=_doing(trace, last),
        ended=trace.end.why if trace.end is not None else "detach" if _left(flight) else None,
        error=_with_known_ranks(trace.errors[0], run.members) if trace.errors else None,
    )


def _left(flight: Sequence[FlightEntry]) -> bool:
    """Return whether the flight record says that it left: a trace cut short by a full disk has no such line."""
    moments = {entry.moment for entry in flight}
    return Moment.LEFT in moments and Moment.FAILED not in moments


def describe_bucket(trace: RankTrace, step: int | None, bucket: int | None) -> str:
    """The bucket with the parameters in it, a few of them by name."""
    if bucket is None:
        return "the others"
    names = parameters_of(trace, step, bucket)
    if not names:
        return f"bucket {bucket}"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"bucket {bucket} ({', '.join(names[:_NAMES_SHOWN])}{more})"


def parameters_of(trace: RankTrace, step: int | None, bucket: int | None) -> list[str]:
    """The names of a bucket's parameters, in the layout that held in that step."""
    layouts = [layout for layout in trace.layouts if step is None or layout.step <= step] or trace.layouts[:1]
    plans = [plan for plan in layouts[-1].buckets if plan.bucket == bucket] if layouts else []
    known = trace.run.parameters
    return [known[index][0] for plan in plans[:1] for index in plan.parameters if 0 <= index < len(known)]


def seconds_ago(run: RunTrace, seen: Mapping[int, LastSeen], now: float) -> float | None:
    """Return how long before `now`, by the wall clock, any rank was last seen."""
    first = run.ranks[min(run.ranks)].run
    times = [each.at for each in seen.values() if each.at is not None]
    return None if not times else now - (max(times) - shift_of(run, min(run.ranks)) - first.clock + first.started)


def shift_of(run: RunTrace, rank: int) -> float:
    """Return what to add to this rank's clock for rank 0's."""
    trace = run.ranks[rank]
    if trace.clocks:
        return trace.clocks[-1].offset_s
    first = run.ranks.get(0)
    if first is None or first.run.host == trace.run.host:
        return 0.0
    return (trace.run.started - trace.run.clock) - (first.run.started - first.run.clock)


def _with_known_ranks(error: Error, group: Sequence[int]) -> Error:
    """The error with ranks that can be, and not too many: a file may name any."""
    return replace(error, ranks=[rank for rank in error.ranks if rank in group][:_MOST_NAMED])


def _of_entry(entry: FlightEntry) -> tuple[int, float]:
    return entry.step, entry.at


def _of_lines(trace: RankTrace) -> tuple[int | None, float | None]:
    """Return how a rank without a flight record was last seen: at the end of the last step that it wrote."""
    if not trace.steps:
        return None, None
    return trace.steps[-1].step, trace.steps[-1].at + trace.steps[-1].step_s


def _doing(trace: RankTrace, entry: FlightEntry | None) -> str:
    if entry is None:
        return f"it had finished step {trace.steps[-1].step}" if trace.steps else "it had not begun a step"
    return _DOING[entry.moment].format(bucket=describe_bucket(trace, entry.step, entry.bucket))
