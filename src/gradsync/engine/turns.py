"""Backwards and steps, counted: which optimizer has stepped since the last backward. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer


class Turns:
    """A backward's turn, then each optimizer's."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._num_backwards = 0
        self._seen = {id(optimizer): 0 for optimizer in optimizers}

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether it was given to attach."""
        return id(optimizer) in self._seen

    def backward_ended(self) -> None:
        """A backward has ended, or something that counts as one."""
        self._num_backwards += 1

    def missed(self, optimizer: Optimizer) -> bool:
        """Whether no backward has ended since its last step."""
        return self._seen[id(optimizer)] == self._num_backwards

    def stepped(self, optimizer: Optimizer) -> None:
        """It has had its turn, even if it applied nothing."""
        self._seen[id(optimizer)] = self._num_backwards

    def is_next(self, optimizer: Optimizer) -> None:
        """Its step is still to come."""
        self._seen[id(optimizer)] = self._num_backwards - 1
