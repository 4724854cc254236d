"""`profile`: run a few steps of a real model and take their times. Needs no other rank, and no process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from gradsync.autotune.stopwatch import Stopwatch, clock_for
from gradsync.autotune.timing import Timing, devices_of, join
from gradsync.engine.bucket import Entry
from gradsync.engine.hooks import Hooks, queue_callback
from gradsync.engine.parameters import take_inventory
from gradsync.planner.profile import ModelProfile


def profile(
    model: torch.nn.Module,
    step: Callable[[], object],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    steps: int = 5,
) -> ModelProfile:
    """What a training step of this model takes, and when each gradient is ready: medians over `steps` steps.

    `step` runs one: forward, backward, and what else belongs to it. It is called once more than that, since the
    first one warms up; what it does to the model stays done. With the optimizer its time is told apart. On a GPU
    nothing waits for the host.

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
    watch = _Watch(Stopwatch(clock_for(devices_of(entries))))
    hooks = Hooks(watch, model, optimizers)  # type: ignore[arg-type]
    hooks.listen(entries)
    try:
        for number in range(steps + 1):
            step()
            watch.stopwatch.lap(counts=number > 0, waited=False)
    finally:
        hooks.remove()
    timing = Timing.of(watch.stopwatch.samples(), len(entries))
    if timing is None:
        raise ValueError(
            f"no gradient of {type(model).__name__} arrived in {steps + 1} calls of step(): it must run forward and "
            "backward of this model, on a loss that depends on its parameters"
        )
    return join([timing], entries, type(model).__name__)


class _Watch:
    """Hears the hooks; see `Listener`."""

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

    def arrived(self, entry: Entry, param: torch.Tensor) -> None:
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

    def closure_ran(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer, closure: bool) -> None:
        if not closure:
            self.stopwatch.optimizer_ends()
