"""The window of micro-batches between two synchronizations.

`accumulate(k)` needs no change to the training loop: between the micro-batches of a window the gradients
are hidden, `.grad` is None, and `step()` and `zero_grad()` find nothing to do. The next backward finds them
again and adds to them.

    backward 1   hide │ step, zero_grad: nothing │ show, backward 2   hide │ … │ show, backward k, synchronize
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gradsync.plan import Accumulate, Pace


class Held(NamedTuple):
    """What an open window holds."""

    backwards: int
    hidden: dict[str, torch.Tensor]


class Window:
    """Counts backward calls and hides gradients inside a window; with k=1 it is always at its end."""

    def __init__(self, pace: Pace) -> None:
        self.k = pace.k if isinstance(pace, Accumulate) else 1
        self.per_batch = pace.backwards if isinstance(pace, Accumulate) else 1
        self.backwards = 0
        self._hidden: dict[str, torch.Tensor] = {}

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the window holds now, the last one perhaps begun only."""
        return -(-self.backwards // self.per_batch)

    @property
    def closing(self) -> bool:
        """Whether the next backward is the window's last."""
        return self.backwards + 1 >= self.k * self.per_batch

    @property
    def full(self) -> bool:
        """Whether the window's last backward has been."""
        return self.backwards >= self.k * self.per_batch

    def has_room_for(self, backwards: int) -> bool:
        """Whether a window of this pace is still open after so many."""
        return backwards < self.k * self.per_batch

    def hide(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Move every gradient out of sight."""
        for name, parameter in parameters:
            if parameter.grad is not None:
                self._hidden[name] = parameter.grad
                parameter.grad = None

    def show(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Bring the hidden gradients back; what arrived meanwhile is added."""
        if not self._hidden:
            return
        for name, parameter in parameters:
            hidden = self._hidden.pop(name, None)
            if hidden is not None:
                parameter.grad = hidden if parameter.grad is None else hidden + parameter.grad
        self._hidden.clear()

    def close(self) -> None:
        """The window was synchronized, or dropped."""
        self.backwards = 0
        self._hidden.clear()

    def state_dict(self) -> Held:
        """What a window in the middle must not lose over a checkpoint."""
        return Held(self.backwards, {name: grad.clone() for name, grad in self._hidden.items()})

    def load_state_dict(self, state: Held) -> None:
        self.backwards = state.backwards
        self._hidden = {name: grad.clone() for name, grad in state.hidden.items()}
