"""A step as it happens: moments are noted, and become a line when the last of them has passed.

    │ optimizer │ input │ forward │ backward │ wait │          at: the end of the last synchronization
    at          │       │         │          └ everything of its own is done
                │       └ the root forward begins
                └ or, where the loader is ours, exactly from next() to its return

What comes between (logging, zero_grad) is no phase. Of some steps every bucket and gradient is kept, on all ranks of
the same and in step with nothing: every tenth would coincide with whatever training does every 10, 20 or 100 steps
(validation, a checkpoint, a log line). A hash needs no state, and all ranks choose alike.

    steps      0 … 49   │ 50 … 59    │ 60 … 69    │ 70 … 79    │ 80 … 89    │
    detailed   all      │ •          │    •       │ •          │          • │   one of each ten, by a hash
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from gradsync.trace.flight import Flight
from gradsync.trace.flight import Moment as FlightMoment
from gradsync.trace.lines import BucketTimes, Error, Health, Line, RankEnd, Stats, StepLine, StepPart, Value
from gradsync.trace.recorder import StepRecord
from gradsync.trace.tally import CodecSpan
from gradsync.trace.timers import HostTimer, Moment, Timer
from gradsync.trace.writer import Writer

_STATS_FIRST, _STATS_EVERY = 50, 500
_AT_ONCE = 32  # steps: to write them together costs a third of writing each
_FLUSH_S = 0.5  # but no later: live views wait for them, and a rank that is killed takes them with it
_MOST_PENDING = 64  # steps whose events have not passed: then they are let go

T = TypeVar("T")
Report = Callable[[], dict[str, Value]]


@dataclass(slots=True)
class BucketMoments:
    """A bucket's way through a step, as it happens."""

    bucket: int
    nbytes: int
    ready: Moment | None = None
    launched: Moment | None = None
    wait_from: Moment | None = None
    wait_to: Moment | None = None
    done: Moment | None = None
    spans: list[CodecSpan] = field(default_factory=list)

    def wait_begins(self, now: Moment | None) -> None:
        """The training thread comes to wait for it."""
        self.wait_from = now

    def wait_ends(self, now: Moment | None, done: Moment | None = None) -> None:
        """The wait for it is over; `done`: when it was there, if that is known."""
        self.wait_to, self.done = now, done


@dataclass(slots=True)
class OpenStep:
    """A step whose moments are noted, and not read yet."""

    at: Moment
    phases: list[tuple[str, Moment, Moment]] = field(default_factory=list)
    gradients: list[tuple[int, Moment]] = field(default_factory=list)
    buckets: list[BucketMoments] = field(default_factory=list)
    header: tuple[Moment, Moment] | None = None
    comm_s: float = 0.0
    nbytes: int = 0
    sent_nbytes: int = 0
    raw_nbytes: int = 0
    held_up_by: str | None = None
    exact_input: bool = False
    # When it is over
    step: int = 0
    end: Moment = 0.0
    counts: bool = True
    detailed: bool = True


class Tracer:
    """Hears of every moment of a rank's steps."""

    def __init__(self, writer: Writer, flight: Flight | None, timer: Timer) -> None:
        self.writer = writer
        self.timer = timer
        self._stats: Report = dict
        self.count = 0
        self.step = 0  # the synchronization under way
        self._flight = flight
        self._note = _no_flight if flight is None else flight.note  # a dozen times a step: no call in between
        self._pending: deque[OpenStep] = deque()
        self._closed = False
        self._flush_at = 0.0
        self._cheap = isinstance(timer, HostTimer)
        self._begin(timer.now())

    def ask(self, stats: Report) -> None:
        """Write down what this says from time to time, and at the end."""
        self._stats = stats

    def _begin(self, at: Moment) -> None:
        self._open = OpenStep(at)
        self._idle_since = at
        self._forward_at: Moment | None = None
        self._backward_at: Moment | None = None
        self._optimizer_at: Moment | None = None
        self.detailed = self.count < FIRST or is_detailed(self.step)
        # An event costs some microseconds, and a model may have thousands of gradients.
        self.each_gradient = self.detailed and (self._cheap or self.count == 0 or is_rare(self.step))

    def detail(self) -> Moment | None:
        """The moment now, on a detailed step."""
        return self.timer.now() if self.detailed else None

    # The moments, in the order of a step

    def optimizer_begins(self) -> None:
        self._optimizer_at = self.timer.now()
        self._note(self.step, FlightMoment.OPTIMIZER)

    def optimizer_ends(self) -> None:
        if self._optimizer_at is not None:
            self._idle_since = self.timer.now()
            self._open.phases.append(("optimizer", self._optimizer_at, self._idle_since))
            self._optimizer_at = None
            self._note(self.step, FlightMoment.STEPPED)

    def input_begins(self) -> Moment:
        self._note(self.step, FlightMoment.INPUT)
        return self.timer.now()

    def input_ends(self, begun: Moment) -> None:
        """A batch is here: from now on input is what the loader took, and nothing else."""
        self._open.phases.append(("input", begun, self.timer.now()))
        self._open.exact_input = True

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """These batches, each with the time that it took to come."""
        source = iter(batches)
        while True:
            begun = self.input_begins()
            try:
                batch = next(source)
            except StopIteration:
                return
            self.input_ends(begun)
            yield batch

    def forward_begins(self) -> None:
        if self._forward_at is not None:
            return  # one more before backward
        self._forward_at = self.timer.now()
        if not self._open.exact_input:
            self._open.phases.append(("input", self._idle_since, self._forward_at))
        self._note(self.step, FlightMoment.FORWARD)

    def backward_begins(self) -> None:
        self._backward_at = self.timer.now()
        if self._forward_at is not None:
            self._open.phases.append(("forward", self._forward_at, self._backward_at))
            self._forward_at = None
        self._note(self.step, FlightMoment.BACKWARD)

    def arrived(self, index: int) -> None:
        """A parameter's gradient is there; told only while `each_gradient`."""
        self._open.gradients.append((index, self.timer.now()))

    def left(self, bucket: int) -> None:
        self._note(self.step, FlightMoment.BUCKET_LEFT, bucket)

    def backward_ends(self) -> None:
        self._idle_since = self.timer.now()
        if self._backward_at is not None:
            self._open.phases.append(("backward", self._backward_at, self._idle_since))
            self._backward_at = None
        self._note(self.step, FlightMoment.COMPUTED)

    def waiting(self, bucket: int) -> None:
        self._note(self.step, FlightMoment.WAITING, bucket)

    def waited(self, record: StepRecord) -> None:
        """A synchronization's record is closed."""
        open_step = self._open
        if record.waited is not None:
            open_step.phases.append(("wait", *record.waited))
        open_step.comm_s += record.comm_s
        open_step.nbytes += record.nbytes
        open_step.sent_nbytes += record.sent_nbytes
        open_step.held_up_by = record.held_up_by
        self._idle_since = self.timer.now()

    def over(
        self,
        step: int,
        counts: bool,
        buckets: Iterable[BucketMoments] = (),
        header: tuple[Moment, Moment] | None = None,
        sent_nbytes: int | None = None,
        raw_nbytes: int | None = None,
    ) -> None:
        """The step is over, and the next begins; `raw_nbytes`: what its gradients take, if not `nbytes`."""
        open_step, end = self._open, self.timer.now()
        open_step.step, open_step.end, open_step.counts, open_step.detailed = step, end, counts, self.detailed
        open_step.buckets, open_step.header = list(buckets), header
        if sent_nbytes is not None:
            open_step.sent_nbytes = sent_nbytes
        open_step.raw_nbytes = open_step.nbytes if raw_nbytes is None else raw_nbytes
        self._note(self.step, FlightMoment.AVERAGED)
        self._pending.append(open_step)
        self.count += 1
        self.step = step + 1
        if len(self._pending) >= _AT_ONCE or time.perf_counter() >= self._flush_at:
            self._flush()
        if self.count == _STATS_FIRST or self.count % _STATS_EVERY == 0:
            self.writer.write(Stats(step, self._stats()))
        self._begin(end)

    def continue_at(self, step: int) -> None:
        """A state was loaded: this is the synchronization under way now."""
        self.step = step
        self._begin(self.timer.now())

    # What is written as it is

    def write(self, line: Line) -> None:
        self.writer.write(line)

    def health(self, finding: Health) -> None:
        self.writer.write(finding)

    def error(self, error: BaseException, ranks: Iterable[int], bucket: int | None = None) -> None:
        """Synchronization failed: what was under way is told as far as it came."""
        self._note(self.step, FlightMoment.FAILED, -1 if bucket is None else bucket)
        self._flush()
        self.writer.write(Error(self.step, type(error).__name__, list(ranks), bucket, str(error)))

    def close(self, why: str) -> None:
        """Write the rest, and end."""
        if self._closed:
            return
        self._closed = True
        self._flush()
        self._note(self.step, FlightMoment.LEFT)
        self.writer.write(Stats(self.step, self._stats()))
        self.writer.write(RankEnd(self.step, why))
        self.writer.close()
        if self._flight is not None:
            self._flight.close()
            self._flight, self._note = None, _no_flight

    def _flush(self) -> None:
        """Write the steps that are known by now; what a device has not passed waits, but not for ever."""
        self._flush_at = time.perf_counter() + _FLUSH_S
        lines = []
        while self._pending and self.timer.passed(self._pending[0].end):
            open_step = self._pending.popleft()
            lines.append(_line(open_step, self.timer))
            self.timer.rebase(open_step.end)
        if lines:
            self.writer.write(*lines)
        while len(self._pending) > _MOST_PENDING:
            self._pending.popleft()


def _no_flight(step: int, moment: FlightMoment, bucket: int = -1) -> None: ...


def _line(open_step: OpenStep, timer: Timer) -> StepLine:
    read = timer.read
    at = read(open_step.at)
    line = StepLine(open_step.step, at, read(open_step.end) - at, _in_order(open_step.phases, at, read))
    line.exposed_s = sum(stop - start for name, start, stop in line.phases if name == "wait")
    line.comm_s = open_step.comm_s
    line.nbytes, line.raw_nbytes, line.sent_nbytes = open_step.nbytes, open_step.raw_nbytes, open_step.sent_nbytes
    line.counts, line.held_up_by, line.exact_input = open_step.counts, open_step.held_up_by, open_step.exact_input
    if open_step.buckets:
        spans = [span for bucket in open_step.buckets for span in bucket.spans]
        line.encode_s, line.decode_s = (_seconds(spans, what, timer) for what in ("encode_s", "decode_s"))
    if open_step.detailed:
        line.buckets, line.gradients, line.header = _details(open_step, timer, at)
    return line


def _details(
    open_step: OpenStep, timer: Timer, at: float
) -> tuple[list[BucketTimes] | None, list[tuple[int, float]] | None, tuple[float, float] | None]:
    read = timer.read

    def offset(moment: Moment | None) -> float | None:
        return None if moment is None else read(moment) - at

    buckets = [_times(bucket, timer, offset) for bucket in open_step.buckets] or None
    gradients = [(index, read(moment) - at) for index, moment in open_step.gradients] or None
    if open_step.header is None:
        return buckets, gradients, None
    return buckets, gradients, (read(open_step.header[0]) - at, read(open_step.header[1]) - at)


def _in_order(
    phases: Iterable[tuple[str, Moment, Moment]], at: float, read: Callable[[Moment], float]
) -> list[StepPart]:
    """Phases one after the other: the host may begin to wait while the device, which is behind, still computes.

    >>> _in_order([("backward", 11.0, 13.0), ("wait", 12.0, 14.0)], 10.0, float)
    [StepPart(name='backward', start=1.0, stop=3.0), StepPart(name='wait', start=3.0, stop=4.0)]
    """
    ordered: list[StepPart] = []
    latest = 0.0
    for name, begun, ended in phases:
        start, stop = read(begun) - at, read(ended) - at
        if start < latest:
            start = latest
        latest = stop if stop > start else start
        ordered.append(StepPart(name, start, latest))
    return ordered


def _times(bucket: BucketMoments, timer: Timer, offset: Callable[[Moment | None], float | None]) -> BucketTimes:
    encoded = next((span.stop for span in bucket.spans if span.what == "encode_s"), bucket.launched)
    return BucketTimes(
        bucket.bucket, offset(bucket.ready), offset(bucket.launched), offset(encoded), offset(bucket.done),
        offset(bucket.wait_from), offset(bucket.wait_to), bucket.nbytes,
        _seconds(bucket.spans, "encode_s", timer), _seconds(bucket.spans, "decode_s", timer),
    )  # fmt: skip


def _seconds(spans: Iterable[CodecSpan], what: str, timer: Timer) -> float:
    return sum([timer.read(span.stop) - timer.read(span.start) for span in spans if span.what == what])


FIRST = 50  # steps after attach: all of them
ONE_IN = 10

_MASK = (1 << 64) - 1
_OF_GRADIENTS = 0x5851F42D  # so that the tens are chosen apart from the steps in them


def is_detailed(step: int) -> bool:
    """One step of each ten.

    >>> [step for step in range(50, 110) if is_detailed(step)]
    [50, 63, 70, 89, 90, 101]
    """
    return step % ONE_IN == _spread(step // ONE_IN) % ONE_IN


def is_rare(step: int) -> bool:
    """One step of each hundred, and a detailed one: for what is too dear for one in ten.

    >>> [step for step in range(1000) if is_rare(step)][:5]
    [5, 194, 260, 391, 400]
    """
    ten = step // ONE_IN
    return is_detailed(step) and ten % ONE_IN == _spread(ten // ONE_IN + _OF_GRADIENTS) % ONE_IN


def _spread(number: int) -> int:
    """Neighbours become numbers that have nothing to do with each other (the finalizer of splitmix64)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
