"""The common part of paces that act on parameters after a step: when they do, and what they refuse."""

from __future__ import annotations

from abc import abstractmethod

from torch.optim import Optimizer

from gradsync.pace.contract import Due, Pace, PaceContext
from gradsync.pace.trained_parameters import TrainedParameters


class AfterStep(Pace):
    """Acts when it is due, after the optimizers' steps or before the next forward: see [The clock] in `contract`."""

    replicas_differ = True

    def __init__(self, context: PaceContext) -> None:
        self._context = context
        self._trained = TrainedParameters(context)
        self._clock = 0  # backwards
        self._due = Due(context.optimizers)

    @abstractmethod
    def _is_time(self) -> bool:
        """Return whether something is due after the step of this clock."""

    @abstractmethod
    def _act(self) -> None:
        """Do what is due."""

    def before_forward(self) -> None:
        if self._due:
            self._due.clear()
            self._act()

    def before_backward(self) -> None:
        self._due.check_done(self._context.lane)
        self._trained.check()

    def after_backward(self, count: int, aborted: int) -> bool:
        self._clock += count
        if aborted:
            self._trained.drop_gradients()
        if self._is_time():
            self._due.set()
        return False

    def after_step(self, optimizer: Optimizer) -> None:
        if self._due.done_by(optimizer):
            self._due.clear()
            self._act()
