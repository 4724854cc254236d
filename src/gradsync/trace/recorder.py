"""The cost of each synchronization, in memory: one small record per step, the last thousand kept."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import torch

from gradsync.trace.timers import Moment


class TimedCollective(Protocol):
    """The record that a collective leaves; times in seconds of the monotonic clock, 0.0 where nobody knows."""

    launched_at: float
    finished_at: float
    nbytes: int


class Synchronized(Protocol):
    """The result of one synchronization."""

    @property
    def step(self) -> int: ...
    @property
    def in_flight(self) -> Sequence[TimedCollective]: ...
    @property
    def held_up_by(self) -> str | None: ...


@dataclass(slots=True)
class StepRecord:
    """One step, from the end of the last synchronization to the end of this one."""

    step: int
    step_s: float = 0.0
    compute_s: float = 0.0  # the step without the waiting
    comm_s: float = 0.0  # time in which at least one collective was under way
    exposed_s: float = 0.0  # time spent waiting with nothing to compute
    nbytes: int = 0  # payload this rank handed to collectives
    num_buckets: int = 0
    sent_nbytes: int = 0  # what it put on a network for that, where the recorder was told
    held_up_by: str | None = None  # the parameter for which full buckets had to wait
    waited: tuple[Moment, Moment] | None = None  # when it began to wait, and stopped
    device: tuple[torch.cuda.Event, torch.cuda.Event] | None = field(default=None, repr=False)


class Recorder:
    """Collects step records; `stats` sums them up."""

    def __init__(self, keep: int = 1000) -> None:
        self._records: deque[StepRecord] = deque(maxlen=keep)
        self._last_end = time.perf_counter()
        self._wait_start: float | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.count = 0
        self._listeners: list[Callable[[StepRecord], None]] = []  # of every record, when it is closed

    def start_waiting(self, on_device: bool) -> None:
        """Backward has computed everything: from here on, time is exposed.

        On a GPU whose collectives run on a stream the host does not wait, so a pair of events takes the
        time on the device; they are read steps later, when they have passed anyway.
        """
        self._wait_start = time.perf_counter()
        if on_device:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()

    def finish_step(
        self,
        step: int,
        spans: Iterable[tuple[float, float]],
        nbytes: int,
        num_buckets: int,
        held_up_by: str | None,
        sent_nbytes: int = 0,
    ) -> None:
        """The gradients are averaged: close the record."""
        now = time.perf_counter()
        waited_from = self._wait_start if self._wait_start is not None else now
        waited = now - waited_from
        step_s = now - self._last_end
        record = StepRecord(step, step_s, 0.0, _union(spans), waited, nbytes, num_buckets, sent_nbytes, held_up_by)
        record.compute_s = record.step_s - waited
        record.waited = (waited_from, now)
        if self._events is not None:
            self._events[1].record()
            record.waited = record.device = self._events
            self._events = None
        self._records.append(record)
        self._last_end = now
        self._wait_start = None
        self.count += 1
        for tell in self._listeners:
            tell(record)

    def tell(self, hear: Callable[[StepRecord], None]) -> None:
        """Tell this one of every record from now on."""
        self._listeners.append(hear)

    def continue_from(self, other: Recorder) -> None:
        """Count on where that one was."""
        self.count = other.count

    def finish(
        self, step: int, in_flight: Sequence[TimedCollective], held_up_by: str | None = None, sent_nbytes: int = 0
    ) -> None:
        """Close the record from what the collectives left behind."""
        spans = [(each.launched_at, each.finished_at) for each in in_flight if each.finished_at]
        self.finish_step(step, spans, sum(each.nbytes for each in in_flight), len(in_flight), held_up_by, sent_nbytes)

    def finish_synchronization(self, brought: Synchronized) -> None:
        """Close the record of a step of the engine."""
        self.finish(brought.step, brought.in_flight, brought.held_up_by)

    def records(self) -> list[StepRecord]:
        """The last steps, oldest first; times on a device are filled in where they are known."""
        for record in self._records:
            if record.device is not None and record.device[1].query():
                record.exposed_s = record.device[0].elapsed_time(record.device[1]) / 1e3
                record.compute_s = record.step_s - record.exposed_s
                record.device = None
        return list(self._records)

    def stats(self) -> dict[str, float | int | str | None]:
        """Medians over the last steps as a flat dict; the first step is left out once there are others."""
        records = self.records()
        if len(records) > 1:
            records = records[1:] if records[0].step == 0 else records
        held_up = Counter(record.held_up_by for record in records if record.held_up_by is not None)
        result: dict[str, float | int | str | None] = {"steps": self.count}
        for key in ("step_s", "compute_s", "comm_s", "exposed_s"):
            result[key] = median(getattr(record, key) for record in records) if records else 0.0
        for key in ("nbytes", "sent_nbytes", "num_buckets"):
            result[key] = int(median(getattr(record, key) for record in records)) if records else 0
        result["held_up_by"] = held_up.most_common(1)[0][0] if held_up else None
        result["held_up_steps"] = sum(held_up.values())
        return result


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals.

    >>> _union([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
