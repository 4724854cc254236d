"""What the ranks measured of their steps, and the one profile they make of it together. Pure.

Each rank brings a row of numbers, equally long on all: how often it measured, medians of its times, its steps one by
one, and when each gradient was ready. NaN stands for what was never seen.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from gradsync.autotune.stopwatch import StepSample
from gradsync.engine.bucket import Entry
from gradsync.planner.profile import Gradient, ModelProfile

_NORMAL = 1.4826  # standard deviations in a median absolute deviation


class Timing(NamedTuple):
    """One rank's medians over its steps."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    input_s: float
    waited_s: float
    compute_s: list[float]  # of every step
    ready_s: list[float]  # by parameter

    @classmethod
    def of(cls, samples: Sequence[StepSample], num_params: int) -> Timing | None:
        """None if there is nothing to sum up."""
        if not samples:
            return None
        return cls(
            forward_s=median(sample.forward_s for sample in samples),
            backward_s=median(sample.backward_s for sample in samples),
            optimizer_s=median(sample.optimizer_s for sample in samples),
            input_s=median(sample.input_s for sample in samples),
            waited_s=median(sample.waited_s for sample in samples),
            compute_s=[sample.compute_s for sample in samples],
            ready_s=[_median(sample.ready_s.get(index, math.nan) for sample in samples) for index in range(num_params)],
        )


def pack(timing: Timing | None, steps: int, num_params: int) -> bytes:
    """A row of fixed length, for at most so many steps."""
    if timing is None:
        return struct.pack(f"<{6 + steps + num_params}d", *[math.nan] * (6 + steps + num_params))
    compute_s = timing.compute_s[:steps]
    padding = [math.nan] * (steps - len(compute_s))
    return struct.pack(
        f"<{6 + steps + num_params}d", len(compute_s), *timing[:5], *compute_s, *padding, *timing.ready_s
    )


def unpack(row: bytes, steps: int) -> Timing | None:
    """What `pack` packed.

    >>> timing = Timing(0.1, 0.2, 0.0, 0.0, 0.05, [0.3, 0.31], [0.15])
    >>> unpack(pack(timing, 5, 1), 5) == timing, unpack(pack(None, 5, 1), 5)
    (True, None)
    """
    count, forward_s, backward_s, optimizer_s, input_s, waited_s, *rest = struct.unpack(f"<{len(row) // 8}d", row)
    if math.isnan(count):
        return None
    return Timing(forward_s, backward_s, optimizer_s, input_s, waited_s, rest[: int(count)], rest[steps:])


def join(timings: Sequence[Timing], entries: Sequence[Entry], name: str) -> ModelProfile:
    """The ranks' measurements as one profile: medians over them, and how far steps and ranks lie apart.

    Every parameter that is trained travels with each synchronization, those that had no gradient last; sparse
    gradients travel apart and are not in it.
    """
    backward_s = median(timing.backward_s for timing in timings)
    gradients = []
    for entry in entries:
        if entry.param.requires_grad and not entry.sparse:
            ready = _median(timing.ready_s[entry.index] for timing in timings)
            ready = backward_s if math.isnan(ready) else min(ready, backward_s)
            gradients.append(Gradient(entry.name, tuple(entry.param.shape), entry.param.dtype, ready))
    gradients.sort(key=lambda gradient: gradient.ready_s)
    return ModelProfile(
        tuple(gradients),
        forward_s=median(timing.forward_s for timing in timings),
        backward_s=backward_s,
        optimizer_s=median(timing.optimizer_s for timing in timings),
        input_s=median(timing.input_s for timing in timings),
        jitter=spread([compute_s for timing in timings for compute_s in timing.compute_s]),
        source="measured",
        name=name,
    )


def spread(seconds: Sequence[float]) -> float | None:
    """The relative standard deviation that lies behind these, one straggler among them set aside; None for too few.

    >>> spread([1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 7.0])
    0.14826
    """
    middle = median(seconds)
    if len(seconds) < 3 or middle <= 0:
        return None
    return round(_NORMAL * median(abs(each - middle) for each in seconds) / middle, 9)


def _median(values: Iterable[float]) -> float:
    """The median of those values that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def devices_of(entries: Iterable[Entry]) -> set[torch.device]:
    """Where the parameters are."""
    return {entry.param.device for entry in entries}
