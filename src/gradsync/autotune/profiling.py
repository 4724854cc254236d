"""`profile`: run a few steps of a real model and take their times. Needs no other rank, and no process group.

Of `gs.auto()` each rank brings a row of numbers, equally long on all: how often it measured, medians of its times, its
steps one by one, and when each gradient was ready; NaN stands for what was never seen. `join` makes one profile of all.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from gradsync.autotune.stopwatch import StepSample, Stopwatch, clock_for
from gradsync.engine.bucket import GradEntry
from gradsync.engine.hooks import HookListener, Hooks, queue_callback
from gradsync.engine.parameters import take_inventory
from gradsync.planner.profile import Gradient, ModelProfile
from gradsync.probe.gpu_stream import pause


def profile(
    model: torch.nn.Module,
    step: Callable[[], object],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    steps: int = 5,
) -> ModelProfile:
    """Return what a training step of this model takes, and when each gradient is ready: medians over `steps` steps.

    `step` runs one: forward, backward, and what else belongs to it. It is called once more than that, since the
    first one warms up, and twice more on a GPU, to see how long the host takes to issue a step; what it does to the
    model stays done. With the optimizer its time is told apart. Of a GPU it is the GPU's own time, while the host is
    far ahead.

    Run it without attaching the model. Time in which others had all cores does not count.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> measured = profile(model, lambda: model(torch.ones(2, 4)).sum().backward())
    >>> sorted(gradient.name for gradient in measured.gradients)
    ['0.bias', '0.weight', '2.bias', '2.weight']
    >>> measured.source, measured.nbytes
    ('measured', 196)
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
    if not callable(step):
        raise TypeError(f"step must be a function that runs one training step and takes nothing, got {step!r}")
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    entries = take_inventory(model, optimizers, ()).entries  # type: ignore[arg-type]
    timer = _HookTimer(Stopwatch(clock_for(devices_of(entries))))
    hooks = Hooks(timer, model, optimizers)  # type: ignore[arg-type]
    hooks.listen(entries)
    devices = devices_of(entries)
    host_s: float | None = None
    try:
        step()
        if {device.type for device in devices} == {"cuda"}:
            host_s = _issuing_s(step, devices)
        for _ in range(steps):
            if host_s is not None:  # so that no kernel waits for the host
                pause(_AHEAD * host_s)
            timer.stopwatch.lap(counts=False, waited=False)
            step()
            timer.stopwatch.lap(counts=True, waited=False)
    finally:
        hooks.remove()
    timing = Timing.of(timer.stopwatch.samples(), len(entries))
    if timing is None:
        raise ValueError(
            f"no gradient of {type(model).__name__} arrived in {steps + 1} calls of step(): it must run forward and "
            "backward of this model, on a loss that depends on its parameters"
        )
    return replace(join([timing], entries, type(model).__name__), host_s=host_s)


_ISSUED_STEPS, _AHEAD = 2, 1.5


def _issuing_s(step: Callable[[], object], devices: set[torch.device]) -> float:
    """The seconds that the host takes to issue a step to GPUs that have nothing else to do.

    A host that waits, for room in the GPU's queue, say, takes longer than it would need: the shortest counts.
    """
    taken = []
    for _ in range(_ISSUED_STEPS):
        for device in devices:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return min(taken)


class _HookTimer(HookListener):
    """Times what the hooks say."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._in_backward = False
        self._fired = False

    def before_forward(self) -> None:
        self._in_backward = False  # a backward that raised did not end
        self.stopwatch.forward_begins()

    def backward_begins(self) -> None:
        if not self._in_backward:
            self._in_backward, self._fired = True, False
            self.stopwatch.backward_begins()
            queue_callback(self._ended)

    def arrived(self, entry: GradEntry, param: torch.Tensor) -> None:
        self.backward_begins()
        self._fired = True
        self.stopwatch.arrived(entry.index)

    def _ended(self) -> None:
        self._in_backward = False
        if self._fired:  # otherwise torch.autograd.grad: no gradient was accumulated
            self.stopwatch.backward_ends()

    def before_step(self, optimizer: Optimizer, closure: bool) -> None:
        if not closure:  # otherwise forward and backward run inside
            self.stopwatch.optimizer_begins()

    def after_step(self, optimizer: Optimizer, closure: bool) -> None:
        if not closure:
            self.stopwatch.optimizer_ends()


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
    """Return what `pack` packed.

    >>> timing = Timing(0.1, 0.2, 0.0, 0.0, 0.05, [0.3, 0.31], [0.15])
    >>> unpack(pack(timing, 5, 1), 5) == timing, unpack(pack(None, 5, 1), 5)
    (True, None)
    """
    count, forward_s, backward_s, optimizer_s, input_s, waited_s, *rest = struct.unpack(f"<{len(row) // 8}d", row)
    if math.isnan(count):
        return None
    return Timing(forward_s, backward_s, optimizer_s, input_s, waited_s, rest[: int(count)], rest[steps:])


def join(timings: Sequence[Timing], entries: Sequence[GradEntry], name: str) -> ModelProfile:
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
    """The median of those that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def devices_of(entries: Iterable[GradEntry]) -> set[torch.device]:
    """The devices of the parameters."""
    return {entry.param.device for entry in entries}
