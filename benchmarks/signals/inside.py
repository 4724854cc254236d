"""Part 1b: how long a step is inside the code of trace, digests and NaN checks, by a clock around every call of it.

Two arms on a noisy machine differ by more than what is to be measured. A clock around the calls shows the work itself,
a little too much of it: the clocks count too. What it cannot show is what that work does to caches and to the other
rank; that is in the difference of the arms.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any

import gradsync as gs
from gradsync.drift.monitor import DriftMonitor
from gradsync.engine import nonfinite
from gradsync.engine.sync_timeline import SyncTimeline
from gradsync.engine.trace_step import Tracing
from gradsync.trace.tracer import Tracer
from signals.cost import ALL, STEPS, Arm, calibrate

# What a step calls: the engine's listener, which calls the tracer; and what others tell the tracer themselves.
_CALLS: dict[type, tuple[str, ...]] = {
    Tracing: (
        "border", "forward_begins", "backward_begins", "backward_ends", "synchronized", "optimizer_begins",
        "optimizer_ends",
    ),
    SyncTimeline: (
        "_backward_begins", "_filled", "_was_packed", "_left", "_header_left", "_header_came", "_bucket_waits",
        "_bucket_came", "_came",
    ),
    Tracer: ("arrived", "waiting", "waited"),
}  # fmt: skip
_WARM_UP_TURNS, _TURNS = 8, 12


class Clocks:
    """Seconds inside each kind of code; what is inside of something that counts already does not count twice."""

    def __init__(self) -> None:
        self.seconds = {"trace": 0.0, "digests": 0.0, "NaN checks": 0.0}
        self._depth = 0

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds[kind] += time.perf_counter() - begun

        return timed

    def install(self) -> None:
        """In this process, which ends with the measurement."""
        for kind, names in _CALLS.items():
            for name in names:
                setattr(kind, name, self.around("trace", getattr(kind, name)))
        for name in ("write", "_header_came"):
            setattr(DriftMonitor, name, self.around("digests", getattr(DriftMonitor, name)))
        nonfinite.is_finite = self.around("NaN checks", nonfinite.is_finite)


def measure(workload: str, samples: int, folder: str) -> dict[str, Any]:
    """On every rank: seconds per step inside, by kind, and of a step."""
    clocks = Clocks()
    clocks.install()
    arm = Arm(ALL, workload, samples, folder)
    for _ in range(_WARM_UP_TURNS):
        arm.turn()
    inside: dict[str, list[float]] = {kind: [] for kind in clocks.seconds}
    steps = []
    for _ in range(_TURNS):
        before = dict(clocks.seconds)
        steps.append(arm.turn())
        for kind, seconds in clocks.seconds.items():
            inside[kind].append((seconds - before[kind]) / STEPS)
    arm.close()
    return {"step_s": median(steps), "inside_s": {kind: fmean(taken) for kind, taken in inside.items()}}


def cell(workload: str, launches: int) -> dict[str, Any]:
    """Rank 0's in each of several launches: the mean over turns, each of which has one detailed step in ten."""
    found, samples = [], calibrate(workload)
    for _ in range(launches):
        with tempfile.TemporaryDirectory(prefix="gradsync-signals-") as folder:
            found.append(gs.spawn(measure, 2, workload, samples, str(Path(folder)), timeout=300)[0])
    kinds = found[0]["inside_s"]
    return {
        "steps_s": [each["step_s"] for each in found],
        "inside_s": {kind: [each["inside_s"][kind] for each in found] for kind in kinds},
    }
