"""The window of micro-batches between two synchronizations.

With `accumulate(k)` backward, step and zero_grad stay as they are: between the micro-batches of a window the
gradients are hidden, `.grad` is None, and `step()` and `zero_grad()` find nothing to do. The next backward finds them
again and adds to them.

    backward 1   hide │ step, zero_grad: nothing │ show, backward 2   hide │ … │ show, backward k, synchronize
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.pace.contract import OpenWindow, Pace, PaceContext
from gradsync.pace.learning_rates import LearningRates
from gradsync.plan.paces import Accumulate, EveryStep


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
            if self.backwards == 0:
                self._rates.window_begins()
            self._rates.micro_batch_begins()
        if not self._hidden:
            return
        self._num_shown = len(self._hidden)
        for name, parameter in self._parameters:
            hidden = self._hidden.pop(name, None)
            if hidden is not None:
                parameter.grad = hidden if parameter.grad is None else hidden + parameter.grad
        self._hidden.clear()

    def after_backward(self, count: int, aborted: int) -> bool:
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


def open_window_pace(pace: EveryStep | Accumulate, context: PaceContext) -> WindowPace:
    """`every_step()` or `accumulate(k)` at work; the latter looks after learning rates."""
    rates = None if isinstance(pace, EveryStep) else LearningRates(context.lane, context.optimizers, pace.k)
    return WindowPace(pace, context.parameters, rates)
