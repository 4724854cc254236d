"""Backwards and steps, counted: which optimizer has stepped since the last backward, and how often they did. Pure.

    synchronization ─ step ─ synchronization      every rank says 1
    synchronization ───────── synchronization      this one says 0: two backwards in one step, or a step that it skipped

Ranks that say different numbers are not in the same step, or no longer replicas. Where a loop may rightly leave a step
out on one rank only, nothing is said: after a synchronization that came to nothing, and in `drain()`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer


class StepCounts:
    """A backward's turn, then each optimizer's."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.num_backwards = 0
        self._seen = {id(optimizer): 0 for optimizer in optimizers}
        self._num_steps = 0  # since the last synchronization
        self._sure = True

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether it was given to attach."""
        return id(optimizer) in self._seen

    def backward_ended(self) -> None:
        """A backward has ended, or something that counts as one."""
        self.num_backwards += 1

    def missed(self, optimizer: Optimizer) -> bool:
        """Whether no backward has ended since its last step."""
        return self._seen[id(optimizer)] == self.num_backwards

    def stepped(self, optimizer: Optimizer) -> None:
        """It has had its turn, even if it applied nothing."""
        self._seen[id(optimizer)] = self.num_backwards

    def step_ended(self) -> None:
        """An optimizer's `step()` has run."""
        self._num_steps += 1

    def steps(self) -> int:
        """How many steps there were since the last synchronization, or -1 where that says nothing."""
        return self._num_steps if self._sure and self._seen else -1

    def begin_anew(self, sure: bool = False) -> None:
        """Count from here; `sure` if every rank has the same reason to step."""
        self._num_steps, self._sure = 0, sure

    def is_next(self, optimizer: Optimizer) -> None:
        """Its step is still to come."""
        self._seen[id(optimizer)] = self.num_backwards - 1
