"""A scheduler that runs ahead of the optimizer: stepped per micro-batch, it is k times too fast in windows of k.

An optimizer knows nothing of its schedulers, but a learning rate that changes while no step is taken is seen. Once is
no mistake (an epoch may end inside a window); between micro-batches again and again it is, and said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from gradsync.transport.lane import Lane


class LearningRates:
    """Looks at them between the micro-batches of a window."""

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
