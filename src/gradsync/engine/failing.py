"""What becomes of a run whose synchronization failed: nothing more is launched, and nobody applies a partial sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradsync.engine.reducer import Reducer
from gradsync.engine.witness import Nobody, Witness
from gradsync.errors import BackwardAborted, GradSyncError, NonFinite, PeerFault


class Failing:
    """The part of `Steps` that knows whether it can go on."""

    def __init__(self, reducer: Reducer) -> None:
        self.failed = False
        self.witness: Witness = Nobody()
        self.reducer = reducer

    @contextmanager
    def failing(self) -> Iterator[None]:
        """After a failed synchronization no rank keeps a partial sum, and nothing more is launched."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """This was raised; some errors end a step only."""
        if self.failed or isinstance(error, BackwardAborted | NonFinite):
            return
        self.failed = True
        if not isinstance(error, PeerFault):
            self.reducer.lane.fail()
        self.witness.failed(error)
        for entry in self.reducer.entries:
            if entry.param.requires_grad:
                entry.param.grad = None

    def clear_gradients(self) -> None:
        """Leave nothing to which a backward would add."""
        for entry in self.reducer.entries:
            entry.param.grad = None

    def refuse_if_failed(self) -> None:
        """Raise if an earlier synchronization did."""
        if self.failed:
            place = self.reducer.lane.place()
            raise GradSyncError(f"{place} an earlier synchronization failed; detach and restart the job")
