"""Notices a scheduler that runs ahead of the optimizer under `accumulate(k)`, and says so once.

A scheduler that is stepped per micro-batch runs k times as fast as the optimizer, which knows nothing of it: torch's
schedulers know their optimizer, but not the other way round. Python's garbage collector knows them all, and is asked
once. How often one steps in a window then tells: once, or at an epoch's end, is right; more in two windows in a row is
not. The rate itself says less: it changes every tenth micro-batch if `StepLR(10)` is stepped per micro-batch, and just
so if it is right in epochs of ten.

Who sets the rate by other means is judged by the rate: one that changes while no step is taken is seen. Once is no
mistake (an epoch may end inside a window); between micro-batches again and again it is.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync.transport.lane import Lane


class LearningRates:
    """Looks at schedulers and learning rates from window to window; on one rank, which speaks for all."""

    def __init__(self, lane: Lane, optimizers: Sequence[Optimizer], k: int) -> None:
        self._lane = lane
        self._optimizers = optimizers
        self._k = k
        self._schedulers: list[weakref.ref[LRScheduler]] = []
        self._looked = False  # for schedulers
        self._counts: list[int] = []  # of each scheduler, when the window began
        self._rates: list[float] | None = None  # inside of a window
        self._noticed = False  # in the window before, or between the micro-batches before
        self._told = lane.groups.rank != 0

    def window_begins(self) -> None:
        """The first micro-batch of a window begins."""
        if self._told:
            return
        if not self._looked and any(hasattr(each.step, "_wrapped_by_lr_sched") for each in self._optimizers):
            self._looked, self._schedulers = True, [weakref.ref(each) for each in _schedulers_of(self._optimizers)]
        before, schedulers = self._counts, [each() for each in self._schedulers]
        self._counts = [0 if each is None else int(each.last_epoch) for each in schedulers]
        if not before:
            return
        num_steps, scheduler = max(
            ((now - then, each) for now, then, each in zip(self._counts, before, schedulers, strict=True)),
            key=lambda pair: pair[0],
        )
        if num_steps > 1 and self._noticed:
            self._tell(f"{type(scheduler).__name__} steps {num_steps} times in each window of accumulate({self._k})")
        self._noticed = num_steps > 1

    def window_goes_on(self) -> None:
        """A micro-batch has ended, and its window has not."""
        self._rates = None if self._told or self._schedulers else self._now()

    def micro_batch_begins(self) -> None:
        """The next one of the same window."""
        before, self._rates = self._rates, None
        if before is None:
            return
        changed = next(((a, b) for a, b in zip(before, self._now(), strict=False) if a != b), None)
        if changed is not None and self._noticed:
            self._tell(
                f"the learning rate changes inside windows of accumulate({self._k}), from {changed[0]:g} to "
                f"{changed[1]:g} just now"
            )
        self._noticed = changed is not None

    def _tell(self, what: str) -> None:
        self._told = True
        warnings.warn(
            f"{self._lane.place()} {what}: a scheduler that steps with every micro-batch runs {self._k} times as fast "
            "as the optimizer. Step it once per window, `if not sync.mid_window: scheduler.step()`",
            stacklevel=6,
        )

    def _now(self) -> list[float]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        # One that is a tensor may lie on a GPU, and is not asked for.
        return [group["lr"] for group in groups if isinstance(group.get("lr"), float | int)]


def _schedulers_of(optimizers: Sequence[Optimizer]) -> Iterator[LRScheduler]:
    """torch's schedulers of these optimizers, also where a framework has wrapped an optimizer."""
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    kinds = set(_with_subclasses(LRScheduler))
    for each in gc.get_objects():
        # A chained one counts no steps itself: those that it steps are found by themselves.
        if type(each) in kinds and isinstance(getattr(each, "last_epoch", None), int):
            wrapped = getattr(each, "optimizer", None)
            if any(id(group) in groups for group in getattr(wrapped, "param_groups", ())):
                yield each


def _with_subclasses(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)
