"""The owner of a shard: takes pushes, makes updates, and answers who may read.

Called by the training thread for this rank's own worker and by the receiver thread for the others; it speaks to
nobody but through `answer`, and never blocks.

    max_staleness = 0        push 1.0 ─┐                          one mean per clock, in rank order,
                             push 1.1 ─┴▶ update 1 ─▶ answers     when the last one has come
    max_staleness > 0, None  push 1.0 ─▶ update 1                 one update per push, as it comes
                             push 1.1 ─▶ update 2

Note [How far an update moves]
    One push is one update with its gradient divided by the number of workers that still push: so one clock of all
    workers of plain SGD moves about as far as one synchronous step. Momentum and weight decay are applied n times per
    clock, and Adam undoes the division: with n workers divide their learning rate by about n. With max_staleness=0
    every gradient is divided by how many came for this clock, then they are added in rank order: one update.

Note [Compensation]
    DC-ASGD corrects a late gradient to first order: g + λ·g·g·(w_now − w_then), with g·g in place of the Hessian's
    diagonal. The owner keeps what each worker last read, as the very bytes it was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from gradsync.pace.async_sgd.messages import OwnerAnswer, unpack
from gradsync.pace.async_sgd.shard import Shard, State
from gradsync.pace.async_sgd.staleness import Clocks, Histogram, staleness_bound
from gradsync.plan.paces import AsyncSGD

Gradients = list[torch.Tensor | None]


class Push(NamedTuple):
    """The gradients that a worker gave."""

    version: int  # of the parameters it computed with
    gradients: Gradients


class Owner:
    """One shard and all that is asked of it."""

    def __init__(
        self, shard: Shard, num_workers: int, settings: AsyncSGD, answer: Callable[[int, OwnerAnswer], None]
    ) -> None:
        self._shard = shard
        self._size = num_workers
        self._settings = settings
        self._answer = answer
        self._lock = threading.Lock()
        self._clocks = Clocks(num_workers)
        self._complete = 0  # with max_staleness=0: the last clock whose mean was applied
        self._pushes: dict[int, dict[int, Push]] = {}  # by clock, then by worker
        self._readers: dict[int, int] = {}  # who waits to read, and at which clock
        self._drained: dict[int, tuple[int, bool]] = {}  # who waits for all: at which clock, and whether it goes on
        self._last_read = [shard.packed()] * num_workers if settings.compensate is not None else []
        self._staleness = Histogram()

    # What workers ask

    def push(self, worker: int, clock: int, version: int, payload: torch.Tensor) -> None:
        """The worker's gradients, computed with the parameters of `version`."""
        with self._lock:
            self._clocks.advance(worker, clock)
            push = Push(version, unpack(payload, self._shard.masters))
            if self._settings.max_staleness == 0:
                self._pushes.setdefault(clock, {})[worker] = push
            else:
                self._update_alone(worker, push)
            self._advance()

    def pull(self, worker: int, clock: int) -> None:
        """Answer as soon as the worker may read."""
        with self._lock:
            self._readers[worker] = clock
            self._advance()

    def leave(self, worker: int) -> None:
        """The worker pushes no more: nobody waits for it."""
        with self._lock:
            self._clocks.leave(worker)
            self._advance()

    def drain(self, worker: int, clock: int, stays: bool) -> None:
        """Answer all workers at once, when the last has asked and all they pushed is applied."""
        with self._lock:
            self._drained[worker] = (clock, stays)
            if len(self._drained) < self._size:
                self._clocks.leave(worker)  # until all are level: nobody waits for who waits for all
                self._advance()
                return
            while self._pushes:
                self._update_together(min(self._pushes))
            level = max(clock for clock, _ in self._drained.values())
            self._clocks.level(level, [self._drained[each][1] for each in range(self._size)])
            self._complete = level
            self._drained.clear()
            for each in range(self._size):
                self._serve(each)

    # What this rank asks

    def note(self) -> None:
        """Take over the hyper-parameters of this rank's optimizers."""
        with self._lock:
            self._shard.note()

    def restart(self, parameters: Sequence[torch.nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Go on from these, and from the optimizers' state."""
        with self._lock:
            self._shard.restart(parameters, optimizers)
            self._last_read = [self._shard.packed()] * len(self._last_read)

    def stragglers(self) -> list[int]:
        """The workers that the others wait for, as far as this owner knows."""
        with self._lock:
            if self._drained:
                return [worker for worker in range(self._size) if worker not in self._drained]
            return self._clocks.slowest_workers()

    def stats(self) -> dict[str, float | int | str | None]:
        with self._lock:
            return {
                "version": self._shard.version,
                "staleness_mean": self._staleness.mean,
                "staleness_max": self._staleness.highest,
                "staleness_bound": staleness_bound(self._settings.max_staleness, self._size),
                **{f"staleness_histogram_{name}": count for name, count in self._staleness.counts().items()},
            }

    def state(self, clock: int) -> State:
        with self._lock:
            return self._shard.state(clock)

    def load(self, state: Mapping[str, torch.Tensor]) -> int:
        """Take over a state before a drain, which brings it to all; returns the clock it was saved at."""
        with self._lock:
            return self._shard.load(state)

    # Under the lock

    def _advance(self) -> None:
        """Do what has become possible."""
        while self._complete < self._clocks.slowest and self._complete + 1 in self._pushes:
            self._update_together(self._complete + 1)
        for worker, clock in list(self._readers.items()):
            if self._clocks.may_read(clock, self._settings.max_staleness):
                del self._readers[worker]
                self._serve(worker)

    def _update_together(self, clock: int) -> None:
        """The mean of what was given for this clock: each divided first, then added in rank order."""
        given = self._pushes.pop(clock)
        for push in given.values():
            self._staleness.add(self._shard.version - push.version)
        shares = [[_divided(g, len(given)) for g in given[worker].gradients] for worker in sorted(given)]
        self._shard.update([_sum(column) for column in zip(*shares, strict=True)])
        self._complete = clock

    def _update_alone(self, worker: int, push: Push) -> None:
        staleness, gradients = self._shard.version - push.version, push.gradients
        self._staleness.add(staleness)
        if self._settings.compensate is not None:
            gradients = self._compensated(worker, gradients, self._settings.compensate)
        lr_scale = 1 / max(1, staleness) if self._settings.scale == "1/staleness" else 1.0
        self._shard.update([_divided(g, self._clocks.num_live) for g in gradients], lr_scale)

    def _compensated(self, worker: int, gradients: Gradients, factor: float) -> Gradients:
        """The gradients corrected to first order: see [Compensation]."""
        payloads = (self._last_read[worker], self._shard.packed())
        then, now = (unpack(payload, self._shard.masters) for payload in payloads)
        return [
            None if g is None or w is None or w_then is None else g + factor * g * g * (w - w_then)
            for g, w, w_then in zip(gradients, now, then, strict=True)
        ]

    def _serve(self, worker: int) -> None:
        payload = self._shard.packed()
        if self._last_read:
            self._last_read[worker] = payload
        self._answer(worker, OwnerAnswer(self._shard.version, self._clocks.slowest, payload))


def _divided(gradient: torch.Tensor | None, by: int) -> torch.Tensor | None:
    return None if gradient is None else gradient / by


def _sum(column: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum in this order; None if nobody used the parameter."""
    total: torch.Tensor | None = None
    for gradient in column:
        if gradient is not None:
            total = gradient if total is None else total.add_(gradient)
    return total
