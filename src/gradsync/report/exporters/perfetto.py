"""A run as a Chrome trace, for ui.perfetto.dev or chrome://tracing: a process per rank, its threads beneath.

    rank 3 (host b)
        compute          │ step 41                                  │   optimizer, input, forward, backward inside it
        waiting                                         │ wait      │   and inside that, the bucket that is waited for
        communication                    │ bucket 0        │            from its launch until its average is there
        communication 2                       │ bucket 1      │

Events go to the file one by one: a trace of any length needs no more memory than its reader.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradsync.report.exporters.alignment import AlignedClocks, align
from gradsync.report.exporters.perfetto_threads import Lanes, Span, ThreadTrack, inside
from gradsync.trace.flight import Moment
from gradsync.trace.lines import BucketPlan, BucketTimes, Error, Health, StepLine, arrived_by
from gradsync.trace.reader import RankTrace, RunTrace

Event = dict[str, Any]

_COMPUTE, _WAITING, _COMMUNICATION = 1, 2, 3
_TIDS = 100  # a rank's threads: some viewers want them to differ between processes, too
_MOST_LANES = 64
_MOST_LETTERS = 200
_MOST_NAMES = 8


def write_perfetto(run: RunTrace, path: Path) -> int:
    """Write the trace, whole or not at all; how many events it has."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="ascii") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            count = 0
            for count, event in enumerate(events(run), start=1):
                file.write(("" if count == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def events(run: RunTrace) -> Iterator[Event]:
    """All events, rank by rank; times in microseconds since the first."""
    clocks = align(run)
    base = min(_first(trace, clocks[rank]) for rank, trace in run.ranks.items())
    for rank, trace in run.ranks.items():
        yield from _Rank(rank, trace, clocks[rank], base).events()


def _first(trace: RankTrace, clock: AlignedClocks) -> float:
    starts = (step.at + clock.offset_s(step.step) for step in trace.steps)
    return min(starts, default=trace.run.clock + clock.offset_s(0))


class _Rank:
    """One rank's process."""

    def __init__(self, rank: int, trace: RankTrace, clock: AlignedClocks, base: float) -> None:
        self._pid = rank + 1  # 0 is the kernel's
        self._trace, self._clock, self._base = trace, clock, base
        self._compute, self._waiting, self._lanes = ThreadTrack(), ThreadTrack(), Lanes(_MOST_LANES)
        self._threads: set[int] = set()
        self._layouts = sorted(trace.layouts, key=lambda layout: layout.step)
        self._plans: dict[int, BucketPlan] = {}

    def events(self) -> Iterator[Event]:
        run = self._trace.run
        named = f"rank {run.rank} (host {_short(run.host)})"
        yield self._about("process_name", 0, {"name": named})
        yield self._about("process_labels", 0, {"labels": _short(f"{run.source}, {run.device}")})
        yield self._about("process_sort_index", 0, {"sort_index": run.rank})
        for step in self._trace.steps:
            yield from self._step(step)
        yield from self._incidents()

    def _step(self, step: StepLine) -> Iterator[Event]:
        while self._layouts and self._layouts[0].step <= step.step:
            self._plans = {plan.bucket: plan for plan in self._layouts.pop(0).buckets}
        at = self._at(step)
        whole = self._compute.place((at(0.0), at(step.step_s)))
        if whole is None:  # a file that was begun anew, or times that go backwards
            return
        said = {"counts": step.counts, "held up by": step.held_up_by and _short(step.held_up_by)}
        yield from self._slice(_COMPUTE, f"step {step.step}", whole, {k: v for k, v in said.items() if v is not None})
        work = [phase for phase in step.phases if phase.name != "wait"]
        for phase, cut in zip(work, inside(whole, [(at(p.start), at(p.stop)) for p in work]), strict=True):
            yield from self._slice(_COMPUTE, _short(phase.name), cut)
        yield from self._wait(step, at)
        yield from self._buckets(step, at)
        yield self._counter(whole[0], "exposed", "ms", round(1e3 * step.exposed_s, 3))
        yield self._counter(whole[0], "sent", "bytes", step.sent_nbytes)

    def _wait(self, step: StepLine, at: Callable[[float], int]) -> Iterator[Event]:
        waits = sorted(
            (b for b in step.buckets or [] if b.wait_from is not None and b.wait_to is not None), key=_waited_from
        )
        spans = [(at(_waited_from(bucket)), at(bucket.wait_to or 0.0)) for bucket in waits]
        for phase in step.phases:
            if phase.name != "wait" or (whole := self._waiting.place((at(phase.start), at(phase.stop)))) is None:
                continue
            yield from self._slice(_WAITING, "wait", whole)
            for bucket, cut in zip(waits, inside(whole, spans), strict=True):
                yield from self._slice(_WAITING, f"wait for bucket {bucket.bucket}", cut)

    def _buckets(self, step: StepLine, at: Callable[[float], int]) -> Iterator[Event]:
        gone = (b for b in step.buckets or [] if b.launched is not None and arrived_by(b) is not None)
        for bucket in sorted(gone, key=lambda b: b.launched or 0.0):
            start, stop = at(bucket.launched or 0.0), at(arrived_by(bucket) or 0.0)
            if stop < start or start < 0 or (lane := self._lanes.place((start, stop))) is None:
                continue
            thread = _COMMUNICATION + lane
            yield from self._slice(thread, f"bucket {bucket.bucket}", (start, stop), self._about_bucket(step, bucket))
            if bucket.sent is not None:
                [cut] = inside((start, stop), [(start, at(bucket.sent))])
                yield from self._slice(thread, "not sent yet", cut)  # encoded, and in a queue behind others

    def _about_bucket(self, step: StepLine, bucket: BucketTimes) -> Event:
        said: Event = {"step": step.step, "nbytes": bucket.nbytes}
        if bucket.ready is not None and bucket.launched is not None:
            said["held back ms"] = round(1e3 * (bucket.launched - bucket.ready), 3)
        if bucket.encode_s or bucket.decode_s:
            said |= {"encode ms": round(1e3 * bucket.encode_s, 3), "decode ms": round(1e3 * bucket.decode_s, 3)}
        if (plan := self._plans.get(bucket.bucket)) is not None:
            said |= {"compressor": _short(plan.compressor or "none"), "parameters": self._names(plan.parameters)}
        return said

    def _names(self, indices: list[int]) -> str:
        known = self._trace.run.parameters
        names = [_short(known[i][0]) if 0 <= i < len(known) else f"#{i}" for i in indices[:_MOST_NAMES]]
        more = len(indices) - len(names)
        return ", ".join(names) + (f" and {more} more" if more > 0 else "")

    def _incidents(self) -> Iterator[Event]:
        """Health and errors know their step only: they stand at its end, or where the flight record saw the failure."""
        ends = {step.step: self._at(step)(step.step_s) for step in self._trace.steps}
        last = max(ends.values(), default=0)
        failed = [entry.at for entry in self._trace.flight if entry.moment is Moment.FAILED]
        lines: list[Health | Error] = [*self._trace.health, *self._trace.errors]
        found: list[tuple[int, Health | Error]] = []
        for line in lines:
            when = ends.get(line.step, last)
            if isinstance(line, Error) and failed:
                when = self._micros(failed[-1] + self._clock.offset_s(line.step))
            found.append((max(0, when), line))
        for when, line in sorted(found, key=lambda pair: pair[0]):
            said = {"step": line.step, "ranks": line.ranks[:_MOST_NAMES], "text": _short(line.text)}
            head = {"name": f"{line.kind}: {_short(line.what)}", "cat": line.kind, "ph": "i", "s": "p", "ts": when}
            yield {**head, "pid": self._pid, "tid": self._tid(_WAITING), "args": said}

    def _at(self, step: StepLine) -> Callable[[float], int]:
        begun = step.at + self._clock.offset_s(step.step)
        return lambda offset: self._micros(begun + offset)

    def _micros(self, time: float) -> int:
        return round(1e6 * (time - self._base))

    def _slice(self, thread: int, name: str, span: Span | None, said: Event | None = None) -> Iterator[Event]:
        if span is None:
            return
        if thread not in self._threads:
            self._threads.add(thread)
            yield self._about("thread_name", thread, {"name": _thread_name(thread)})
            yield self._about("thread_sort_index", thread, {"sort_index": thread})
        event: Event = {"name": name, "ph": "X", "ts": span[0], "dur": span[1] - span[0]}
        event |= {"cat": "gradsync", "pid": self._pid, "tid": self._tid(thread)}
        yield event | ({"args": said} if said else {})

    def _counter(self, ts: int, name: str, unit: str, value: float) -> Event:
        return {"name": name, "ph": "C", "ts": ts, "pid": self._pid, "tid": self._tid(0), "args": {unit: value}}

    def _about(self, what: str, thread: int, said: Event) -> Event:
        return {"name": what, "ph": "M", "pid": self._pid, "tid": self._tid(thread), "args": said}

    def _tid(self, thread: int) -> int:
        return self._pid * _TIDS + thread


def _waited_from(bucket: BucketTimes) -> float:
    return bucket.wait_from or 0.0


def _thread_name(thread: int) -> str:
    if thread < _COMMUNICATION:
        return "compute" if thread == _COMPUTE else "waiting"
    return "communication" if thread == _COMMUNICATION else f"communication {thread - _COMMUNICATION + 1}"


def _short(text: str) -> str:
    """A name, cut and made printable: names come from files that anybody may have written."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:_MOST_LETTERS])
    return shown + ("…" if len(text) > _MOST_LETTERS else "")
