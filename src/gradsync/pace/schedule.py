"""When something is due that belongs after a step: see [The clock] in `contract`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from gradsync.errors import GradSyncError
from gradsync.transport.lane import Lane


class Due:
    """Something is to be done once all optimizers have stepped."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._all = {id(optimizer) for optimizer in optimizers}
        self._missing: set[int] | None = None  # who has not stepped yet; None: nothing is due

    def __bool__(self) -> bool:
        return self._missing is not None

    def set(self) -> None:
        """A backward has ended after which it is due."""
        self._missing = set(self._all)

    def clear(self) -> None:
        """It was done."""
        self._missing = None

    def waits_for(self, optimizer: Optimizer) -> bool:
        """Whether this one has not stepped yet."""
        return self._missing is not None and id(optimizer) in self._missing

    def done_by(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped: whether it was the last one."""
        if self._missing is None:
            return False
        self._missing.discard(id(optimizer))
        return not self._missing

    def check_done(self, lane: Lane) -> None:
        """A backward begins: raise if it was not done before the forward, since parameters cannot change between."""
        if self:
            raise GradSyncError(
                f"{lane.place()} a backward begins, but parameters were to be exchanged after the last one, before "
                "this forward. Call the model itself, not its parts; if a step takes several backwards, run all but "
                "the last under sync.no_sync()"
            )
