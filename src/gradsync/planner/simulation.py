"""One training step, simulated: computation, the pipeline that codes, and the wire, each doing one thing at a time.

    compute   │ forward │ backward ──────────────────────── │ waits │ optimizer │
                             ready ▼        ▼          ▼         ▲
    codec     │                    │ enc 0 ││ enc 1 │ dec 0 │ ...
    wire      │                            │ bucket 0 ──│ bucket 1 ──│

Whoever is at work asks for a share of the rank's cores (`Device.cores`): computation and coding for a whole one, the
wire for its `load`. If there is not enough, shares are max-min fair: who asks for little gets it, the others are
equally slow. All ranks are alike, so one is simulated; what makes them differ is in `stragglers`.

A GPU computes what its host has issued. Where the host takes about as long as the GPU, each bucket that it issues
keeps computation waiting:

    host      │ forward │ backward │ bucket 0 │ backward │ bucket 1 │ ...
    compute   │ forward ─│ backward ─│        │ backward ─│

The header is the host's too then, and goes by other ways than gradients. A host that is faster than its GPU has begun
the next step when this one ends, so of two steps the second one counts.

The pipeline goes on as `exchange.pipeline` does: a bucket begins its rounds, then each one that is under way goes a
round further, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

from gradsync.planner.prediction import StepSpan
from gradsync.planner.stages import Stage


class SimulatedBucket(NamedTuple):
    """The gradients that travel together."""

    label: str
    ready_s: float  # of backward's own work, when its last gradient is there
    stages: Sequence[Stage]


class ComputeTimes(NamedTuple):
    """The computation of a rank around the synchronization, in seconds on its own."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    host_share: float = 0.0  # of these seconds, what the host takes to issue that; 0: it is always far ahead


class _Work(NamedTuple):
    """Something that takes time and a share of the cores."""

    seconds: float
    load: float
    track: Literal["compute", "codec", "wire", "host"]
    label: str


_STEPS = 2  # with a host
_Until = Callable[[], bool]
_Actor = Generator["_Work | _Until", None, None]


class _OnWire(NamedTuple):
    """Something on its way."""

    stage: Stage
    label: str
    here: list[bool]  # whether it has arrived
    is_whole: bool  # it is all that its bucket needs


class _BucketProgress(NamedTuple):
    """A bucket at the pipeline."""

    bucket: SimulatedBucket
    at: int = 0  # its next stage
    waits_for: _OnWire | None = None


class _Job:
    """The job that an actor is at."""

    def __init__(self, actor: _Actor) -> None:
        self.actor = actor
        self.work: _Work | None = None
        self.until: _Until | None = None
        self.left_s = 0.0
        self.begun_s = 0.0


def simulate(
    compute: ComputeTimes,
    buckets: Sequence[SimulatedBucket],
    header: Stage,
    cores: float,
    overlap: bool,
    on_stream: bool = False,
) -> list[StepSpan]:
    """The spans of one step; it ends with the last. `on_stream`: a host issues all of it to a GPU, but the header."""
    return _Simulation(compute, buckets, header, cores, overlap, on_stream).run()


class _Simulation:
    def __init__(
        self,
        compute: ComputeTimes,
        buckets: Sequence[SimulatedBucket],
        header: Stage,
        cores: float,
        overlap: bool,
        on_stream: bool,
    ) -> None:
        self._compute, self._buckets, self._header = compute, buckets, header
        self._cores, self._overlap, self._on_stream = cores, overlap, on_stream
        self._host_at = 0  # moments that the host has passed, of those in `_issuing`
        self._submitted: deque[SimulatedBucket | None] = deque()  # for the pipeline; None: no more
        self._to_send: deque[_OnWire] = deque()
        self._arrived = 0
        self._now = self._began_s = 0.0  # and when the step began that is under way
        self._done = False

    def run(self) -> list[StepSpan]:
        jobs = [_Job(actor) for actor in (self._issuing(), self._computing(), self._code(), self._wire())]
        spans: list[StepSpan] = []
        for job in jobs:
            self._next(job)
        while not self._done:
            if not self._wake(jobs):
                self._pass_time(jobs, spans)
        if self._now > end_s(spans):  # a host that is not done yet
            spans.append(StepSpan("compute", "optimizer", self._now, self._now))
        return _marked([_since(self._began_s, span) for span in spans if span.start_s >= self._began_s])

    def _next(self, job: _Job) -> None:
        job.work = job.until = None
        step = next(job.actor, None)
        if isinstance(step, _Work):
            job.work, job.left_s, job.begun_s = step, step.seconds, self._now
        else:
            job.until = step

    def _wake(self, jobs: list[_Job]) -> bool:
        """Let one go on that waited for something that is so now."""
        for job in jobs:
            if job.until is not None and job.until():
                self._next(job)
                return True
        return False

    def _pass_time(self, jobs: list[_Job], spans: list[StepSpan]) -> None:
        """Pass time until the first of those at work is done."""
        busy = [job for job in jobs if job.work is not None]
        assert busy, "a step that never ends"
        speeds = fair_speeds([job.work.load for job in busy if job.work is not None], self._cores)
        passed = min(job.left_s / speed for job, speed in zip(busy, speeds, strict=True))
        for job, speed in zip(busy, speeds, strict=True):
            job.left_s -= passed * speed
        self._now += passed
        for job in busy:
            if job.left_s <= 1e-15 and job.work is not None:
                if job.work.seconds > 0 and job.work.track != "host":
                    spans.append(StepSpan(job.work.track, job.work.label, job.begun_s, self._now))
                self._next(job)

    # The actors

    def _issuing(self) -> _Actor:
        """The host of a GPU. `_host_at` counts the begin and the end of each part of backward, and optimizers."""
        share = self._compute.host_share
        for _ in range(_STEPS if share else 0):
            yield _Work(share * self._compute.forward_s, 0.0, "host", "forward")
            for part_s, buckets in self._parts():
                self._host_at += 1
                yield _Work(share * part_s, 0.0, "host", "backward")
                issues_s = sum(stage.host_s for bucket in buckets for stage in bucket.stages)
                yield _Work(issues_s, 0.0, "host", "buckets")
                self._host_at += 1
            yield _Work(self._header.seconds, 0.0, "host", "header")
            yield _Work(share * self._compute.optimizer_s, 0.0, "host", "optimizer")
            self._host_at += 1

    def _parts(self) -> Iterator[tuple[float, Sequence[SimulatedBucket]]]:
        """Backward, cut where buckets get full: seconds, and the buckets that follow."""
        passed = 0.0
        for bucket in self._buckets if self._overlap else ():
            yield max(0.0, bucket.ready_s - passed), [bucket]
            passed = max(passed, bucket.ready_s)
        yield max(0.0, self._compute.backward_s - passed), [] if self._overlap else self._buckets

    def _computing(self) -> _Actor:
        waits, at = self._compute.host_share > 0, 0
        for step in range(_STEPS if waits else 1):
            self._began_s = self._now
            yield _Work(self._compute.forward_s, 1.0, "compute", "forward")
            for part_s, buckets in self._parts():
                if waits:
                    yield partial(self._host_is_at, at + 1)
                yield _Work(part_s, 1.0, "compute", "backward")
                if waits:
                    yield partial(self._host_is_at, at := at + 2)
                for bucket in buckets:
                    self._submit(bucket)
            self._submitted.append(None)
            due = (step + 1) * len(self._buckets)
            if self._on_stream:
                if not waits:
                    yield _Work(self._header.seconds, 0.0, "wire", "header")
                yield partial(self._have_arrived, due)
            else:
                header = self._send(self._header, "header")
                yield partial(self._have_arrived, due, header.here)
            if waits:
                yield partial(self._host_is_at, at := at + 1)
            yield _Work(self._compute.optimizer_s, 1.0, "compute", "optimizer")
        self._done = True
        yield lambda: False

    def _have_arrived(self, buckets: int, header: Sequence[bool] = (True,)) -> bool:
        return self._arrived == buckets and header[0]

    def _host_is_at(self, moment: int) -> bool:
        return self._host_at >= moment

    def _submit(self, bucket: SimulatedBucket) -> None:
        """Hand a bucket to the pipeline, or straight to the wire if there is nothing to code."""
        if len(bucket.stages) == 1 and bucket.stages[0].on_wire:
            self._send(bucket.stages[0], bucket.label, is_whole=True)
        else:
            self._submitted.append(bucket)

    def _send(self, stage: Stage, label: str, is_whole: bool = False) -> _OnWire:
        self._to_send.append(_OnWire(stage, label, [False], is_whole))
        return self._to_send[-1]

    def _wire(self) -> _Actor:
        while True:
            yield lambda: bool(self._to_send)
            sent = self._to_send.popleft()
            yield _Work(sent.stage.seconds, sent.stage.load, "wire", sent.label)
            sent.here[0] = True
            self._arrived += sent.is_whole

    def _code(self) -> _Actor:
        in_flight: list[_BucketProgress] = []
        while True:
            yield lambda: bool(self._submitted)
            bucket = self._submitted.popleft()
            if bucket is not None:
                newest = yield from self._advance(_BucketProgress(bucket))
                in_flight = yield from self._advance_all(in_flight)
                in_flight += [newest] if newest else []
            while bucket is None and in_flight:
                in_flight = yield from self._advance_all(in_flight)

    def _advance_all(self, in_flight: list[_BucketProgress]) -> Generator[_Work | _Until, None, list[_BucketProgress]]:
        going = []
        for each in in_flight:
            going.append((yield from self._advance(each)))
        return [each for each in going if each is not None]

    def _advance(self, each: _BucketProgress) -> Generator[_Work | _Until, None, _BucketProgress | None]:
        """Take a bucket one round further; None when it has arrived."""
        bucket, at, sent = each
        if sent is not None:
            yield lambda: sent.here[0]
        while at < len(bucket.stages) and not bucket.stages[at].on_wire:
            yield _Work(bucket.stages[at].seconds, 1.0, "codec", bucket.label)
            at += 1
        if at == len(bucket.stages):
            self._arrived += 1
            return None
        return _BucketProgress(bucket, at + 1, self._send(bucket.stages[at], bucket.label))


def fair_speeds(loads: Sequence[float], cores: float) -> list[float]:
    """Return how fast each goes, from 0 to 1: max-min fair shares of the cores.

    >>> fair_speeds([1.0, 0.1], 1.0), fair_speeds([1.0, 1.0], 1.0), fair_speeds([1.0, 0.0], 2.0)
    ([0.9, 1.0], [0.5, 0.5], [1.0, 1.0])
    """
    speeds, left = [1.0] * len(loads), cores
    waiting = sorted(range(len(loads)), key=lambda number: loads[number])
    for place, number in enumerate(waiting):
        share = min(loads[number], left / (len(waiting) - place))
        left -= share
        if loads[number] > 0:
            speeds[number] = share / loads[number]
    return speeds


def _since(begun_s: float, span: StepSpan) -> StepSpan:
    return span._replace(start_s=span.start_s - begun_s, stop_s=span.stop_s - begun_s)


def _marked(spans: list[StepSpan]) -> list[StepSpan]:
    """The spans in order; what is on the wire or coded while computation waits is exposed."""
    computed = sorted((span.start_s, span.stop_s) for span in spans if span.track == "compute")
    waits = [(a[1], b[0]) for a, b in pairwise(computed) if b[0] > a[1]]
    if computed:
        waits.append((computed[-1][1], end_s(spans)))
    marked = []
    for span in spans:
        waited = sum(max(0.0, min(stop, span.stop_s) - max(start, span.start_s)) for start, stop in waits)
        marked.append(span._replace(exposed=span.track != "compute" and waited > 1e-12))
    return sorted(marked, key=lambda span: (span.start_s, span.track))


def end_s(spans: Sequence[StepSpan]) -> float:
    """The time when the last span is over."""
    return max((span.stop_s for span in spans), default=0.0)
