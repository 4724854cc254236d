"""The moments of a step become seconds: forward, backward, each gradient's readiness, optimizer, the rest.

    │ input │ forward │ g  g g │ waiting for others │ optimizer │ input │ …
            │         └ backward begins             └ a lap of attach ends here
            └ the first forward since the last backward

On a GPU a moment is an event on the stream: the host is never made to wait, and all are read at the end.
On a CPU the time that this thread waited for a core, because others had them all, is no part of its work: how long that
is depends on who else runs, and the planner reckons with it (`Device.cores`).
Of several backwards in one step only the last counts as such: gradients leave in it, and what came before is forward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

_QUEUE = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, waiting for one, and turns

Moment = Any  # a float of the host's clock, or an event of a device: only its clock knows


class StepClock(Protocol):
    """Takes moments, and tells the seconds between two."""

    def now(self) -> Moment: ...
    def seconds(self, first: Moment, last: Moment) -> float: ...
    def queued_s(self) -> float:
        """Return how long this thread has waited for a core so far; 0 where that is not known."""


class HostClock:
    """The host's own clock."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def queued_s(self) -> float:
        try:
            return int(_QUEUE.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0  # this kernel does not count it


class DeviceClock:
    """The clock of a GPU, which runs behind the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Wait for both moments, so only when all laps are over; return the seconds between them."""
        first.synchronize()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def queued_s(self) -> float:
        return 0.0


def clock_for(devices: Iterable[torch.device]) -> StepClock:
    """The clock of the one GPU that these are; with several, or none, the host's."""
    found = set(devices)
    gpus = [device for device in found if device.type == "cuda"]
    return DeviceClock(gpus[0]) if len(gpus) == len(found) == 1 else HostClock()


class Timestamp(NamedTuple):
    """The time at which one part of a step ends and the next begins."""

    moment: Moment
    queued_s: float  # how long this thread had waited for a core until then
    thread: int


class Pass(NamedTuple):
    """A forward and its backward."""

    forward: Timestamp
    backward: Timestamp
    end: Timestamp


class Lap(NamedTuple):
    """The moments of one step."""

    start: Timestamp
    stop: Timestamp
    passes: list[Pass]
    arrivals: dict[int, Moment]  # by parameter
    optimizer: list[tuple[Timestamp, Timestamp]]
    waited: bool  # from the end of the last backward to the end of the lap


class StepSample(NamedTuple):
    """One step in seconds."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    input_s: float
    waited_s: float  # no part of the computation
    ready_s: dict[int, float]  # by parameter, since the last backward began

    @property
    def compute_s(self) -> float:
        return self.input_s + self.forward_s + self.backward_s + self.optimizer_s


class Stopwatch:
    """Collects laps; `samples` reads them."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._laps: list[Lap] = []
        self._start_lap()

    def _start_lap(self) -> None:
        self._start = self._latest = self._now()
        self._forward: Timestamp | None = None
        self._backward = self._start
        self._optimizer_since: Timestamp | None = None
        self._passes: list[Pass] = []
        self._arrivals: dict[int, Moment] = {}
        self._optimizer: list[tuple[Timestamp, Timestamp]] = []

    def forward_begins(self) -> None:
        if self._forward is None:
            self._forward = self._now()

    def backward_begins(self) -> None:
        self._backward = self._now()

    def arrived(self, index: int) -> None:
        self._arrivals[index] = self._clock.now()

    def backward_ends(self) -> None:
        # Parts of a model that are called one by one tell of no forward: then it is all that came before.
        begun = self._latest if self._forward is None else self._forward
        self._latest = self._now()
        self._passes.append(Pass(begun, self._backward, self._latest))
        self._forward = None

    def optimizer_begins(self) -> None:
        self._optimizer_since = self._now()

    def optimizer_ends(self) -> None:
        if self._optimizer_since is not None:
            self._latest = self._now()
            self._optimizer.append((self._optimizer_since, self._latest))
            self._optimizer_since = None

    def lap(self, counts: bool, waited: bool) -> None:
        """A step has ended, and the next begins; `waited`: since its last backward, for other ranks."""
        if counts and self._passes:
            stop = self._now()
            self._laps.append(Lap(self._start, stop, self._passes, self._arrivals, self._optimizer, waited))
        self._start_lap()

    def samples(self) -> list[StepSample]:
        """All laps that counted, in seconds."""
        return [self._read(lap) for lap in self._laps]

    def _now(self) -> Timestamp:
        return Timestamp(self._clock.now(), self._clock.queued_s(), threading.get_ident())

    def _seconds(self, first: Timestamp, last: Timestamp) -> float:
        seconds = self._clock.seconds(first.moment, last.moment)
        queued = last.queued_s - first.queued_s if first.thread == last.thread else 0.0
        return max(0.0, seconds - queued)

    def _read(self, lap: Lap) -> StepSample:
        *earlier, last = lap.passes
        before = sum(self._seconds(each.forward, each.end) for each in earlier)
        forward_s = before + self._seconds(last.forward, last.backward)
        backward_s = self._seconds(last.backward, last.end)
        optimizer_s = sum(self._seconds(*span) for span in lap.optimizer)
        waited_s = self._seconds(last.end, lap.stop) if lap.waited else 0.0
        rest = self._seconds(lap.start, lap.stop) - forward_s - backward_s - optimizer_s - waited_s
        return StepSample(forward_s, backward_s, optimizer_s, max(0.0, rest), waited_s, self._ready(lap, backward_s))

    def _ready(self, lap: Lap, backward_s: float) -> dict[int, float]:
        """Seconds from the beginning of the last backward; what arrived in an earlier one only was there by then."""
        last = lap.passes[-1]
        whole = self._clock.seconds(last.backward.moment, last.end.moment)
        share = backward_s / whole if whole > 0 else 1.0  # waiting for a core is spread over it
        since = {index: self._clock.seconds(last.backward.moment, moment) for index, moment in lap.arrivals.items()}
        return {index: max(0.0, share * seconds) for index, seconds in since.items()}
