"""The window of micro-batches between two synchronizations.

With `accumulate(k)` backward, step and zero_grad stay as they are: between the micro-batches of a window the
gradients are hidden, `.grad` is None, and `step()` and `zero_grad()` find nothing to do. The next backward finds them
again and adds to them.

    backward 1   hide │ step, zero_grad: nothing │ show, backward 2   hide │ … │ show, backward k, synchronize

A scheduler that is stepped per micro-batch runs k times as fast as the optimizer, which knows nothing of it. But a
learning rate that changes while no step is taken is seen. Once is no mistake (an epoch may end inside a window);
between micro-batches again and again it is, and said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from gradsync.agreement.header import Flag
from gradsync.pace.contract import OpenWindow, Pace
from gradsync.plan.paces import Accumulate, EveryStep
from gradsync.transport.lane import Lane


class WindowPace(Pace):
    """Counts backward calls and hides gradients inside a window; with k=1 it is always at its end."""

    engine_averages = True

    def __init__(
        self,
        pace: EveryStep | Accumulate,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        rates: LearningRates | None = None,
    ) -> None:
        self.k = pace.k if isinstance(pace, Accumulate) else 1
        self.per_batch = pace.backwards if isinstance(pace, Accumulate) else 1
        self.backwards = 0
        self._parameters = parameters
        self._hidden: dict[str, torch.Tensor] = {}
        self._num_shown = 0  # of a window that goes on: how many a backward has begun to add to
        self._rates = rates if self.k > 1 else None

    @property
    def micro_batches(self) -> int:
        return -(-self.backwards // self.per_batch)

    @property
    def streams(self) -> bool:
        return self.backwards + 1 >= self.k * self.per_batch

    @property
    def mid_window(self) -> bool:
        return self.backwards > 0

    def has_room_for(self, backwards: int) -> bool:
        return backwards < self.k * self.per_batch

    def before_backward(self) -> None:
        """Bring the hidden gradients back; what arrived meanwhile is added."""
        if self._rates is not None:
            self._rates.micro_batch_begins()
        if not self._hidden:
            return
        self._num_shown = len(self._hidden)
        for name, parameter in self._parameters:
            hidden = self._hidden.pop(name, None)
            if hidden is not None:
                parameter.grad = hidden if parameter.grad is None else hidden + parameter.grad
        self._hidden.clear()

    def after_backward(self, count: int, aborted: Flag) -> bool:
        self.backwards += count
        if not self.has_room_for(self.backwards):
            return True
        if self._rates is not None and self.backwards % self.per_batch == 0:
            self._rates.window_goes_on()
        self.put_away()
        return False

    def put_away(self) -> None:
        """Move every gradient out of sight, if a window is open."""
        self._num_shown = 0
        for name, parameter in self._parameters if self.backwards else ():
            if parameter.grad is not None:
                self._hidden[name] = parameter.grad
                parameter.grad = None

    def averaged(self) -> None:
        self.backwards = self._num_shown = 0
        self._hidden.clear()

    def open_window(self) -> OpenWindow:
        return OpenWindow(self.backwards, {name: grad.clone() for name, grad in self._hidden.items()}, self._num_shown)

    def resume_window(self, window: OpenWindow) -> None:
        self.backwards = window.backwards
        self._hidden, self._num_shown = {name: grad.clone() for name, grad in window.hidden.items()}, 0

    def rescale(self, ratio: torch.Tensor) -> None:
        for name, grad in self._hidden.items():
            self._hidden[name] = grad.mul_(ratio.to(grad.device, non_blocking=True))

    def close(self, together: bool) -> None:
        self.before_backward()


class LearningRates:
    """Looks at the learning rates between the micro-batches of a window."""

    def __init__(self, lane: Lane, optimizers: Sequence[Optimizer], k: int) -> None:
        self._lane = lane
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._k = k
        self._seen: list[float] | None = None
        self._changed_before = False
        self._told = lane.groups.rank != 0  # one rank says it

    def window_goes_on(self) -> None:
        """A micro-batch has ended, and its window has not."""
        self._seen = None if self._told else self._now()

    def micro_batch_begins(self) -> None:
        """The next one of the same window."""
        before, self._seen = self._seen, None
        if before is None:
            return
        now = self._now()
        changed = next(((a, b) for a, b in zip(before, now, strict=False) if a != b), None)
        if changed is not None and self._changed_before:
            self._told = True
            warnings.warn(
                f"{self._lane.place()} the learning rate changes inside windows of accumulate({self._k}), from "
                f"{changed[0]:g} to {changed[1]:g} just now: a scheduler that steps with every micro-batch runs "
                f"{self._k} times as fast as the optimizer. Step it once per window, "
                "`if not sync.mid_window: scheduler.step()`",
                stacklevel=6,
            )
        self._changed_before = changed is not None

    def _now(self) -> list[float]:
        # One that is a tensor may lie on a GPU, and is not asked for.
        return [group["lr"] for group in self._groups if isinstance(group.get("lr"), float | int)]
