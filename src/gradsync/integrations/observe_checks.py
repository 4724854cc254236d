"""The comparison that an observer makes of ranks: a header of our own with every sum of DDP, read one step later.

    step           7                  8                  9
    header      └─ sent ─┐         └─ sent ─┐
    read                             of 7               of 8     by then it has arrived: nobody waits

An observer can only tell: whatever it finds, DDP has averaged already. Nor may it hold the training up: a header that
does not come is waited for for seconds, once, and then nothing is compared any more.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from gradsync.agreement.header import Head, HeaderExchange
from gradsync.agreement.outcome import HealthLog, nonfinite
from gradsync.drift.monitor import DriftMonitor
from gradsync.engine.bucket import GradEntry
from gradsync.integrations.hook_agreement import compare
from gradsync.plan.guard import Guard
from gradsync.transport.lane import Lane

_PATIENCE_S = 5.0  # for a header that others sent, if they did, before their last sum


def say(text: str) -> None:
    """Warn; where warnings are errors, say it without one: nobody's training ends because somebody watches."""
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        sys.stderr.write(f"gradsync: {text}\n")


class ObserverChecks:
    """The headers under way, and what was found."""

    def __init__(self, lane: Lane, entries: list[GradEntry], guard: Guard) -> None:
        self.health_log = HealthLog(guard.max_skips)
        self._paused = False
        self.counts_nonfinite = guard.nonfinite != "allow"  # whether it wants to see every gradient
        self._lane = lane
        self._entries = entries
        self._names = [entry.name for entry in entries]
        self._on = lane.groups.size > 1 and (guard.drift != "off" or self.counts_nonfinite)
        self._seen: list[Optimizer] = []
        self._optimizers: list[Optimizer] = []
        self._drift_monitor = DriftMonitor(entries, self._optimizers, None, guard, self.health_log, lane.groups.size)
        self._under_way: deque[tuple[int, HeaderExchange]] = deque()
        self._num_bad: list[tuple[int, torch.Tensor]] = []  # of each gradient, perhaps still counted on a device
        self._step = 0  # announced so far: the lane's steps differ between ranks after join()

    def pause(self, paused: bool) -> None:
        """Compare nothing while `paused`: ranks may be out of data."""
        self._paused = paused

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """This optimizer steps the model: its state is compared too.

        If it steps all of it: one that has only a part (of ZeroRedundancyOptimizer, say) may have another elsewhere.
        """
        if any(optimizer is known for known in self._seen):
            return
        self._seen.append(optimizer)
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if all(id(entry.param) in stepped for entry in self._entries if entry.param.requires_grad):
            self._optimizers.append(optimizer)

    def count_nonfinite(self, entry: GradEntry, grad: torch.Tensor | None) -> None:
        """Count NaN and Inf in a gradient before it is averaged. Nobody waits for the answer here."""
        if grad is not None:
            values = grad.detach()._values() if grad.is_sparse else grad.detach()
            self._num_bad.append((entry.index, values.isfinite().logical_not_().sum()))

    def replaced(self) -> None:
        """Entries have other parameters from now on."""
        self._drift_monitor.replaced()

    def announce(self) -> None:
        """This rank's gradients are computed, and parameters at rest."""
        found, self._num_bad = self._first_bad(), []
        if not self._on or self._paused:
            return
        if self._under_way:
            # Boards hold one: who sends the next has read the last.
            self._lane.wait(self._under_way[-1][1].pending, _PATIENCE_S)
        replica_digest, loss_scale = self._drift_monitor.announce()
        index, count = found
        head = Head(
            self._step,
            0,
            1.0,
            1,
            index,
            1,
            0,
            bytes(8),
            num_nonfinite=count,
            replica_digest=replica_digest,
            loss_scale=loss_scale,
        )
        self._under_way.append((self._lane.step, HeaderExchange(self._lane, head, bytes(len(self._entries)))))
        self._drift_monitor.take(self._step)
        self._step += 1

    def hear(self) -> None:
        """Read the header before the last; every rank is at the same place."""
        if len(self._under_way) > 1:
            self._read()()

    def stop(self) -> None:
        """Compare nothing any more."""
        self._on = self.counts_nonfinite = False

    def goodbye(self) -> bool:
        """Wait until every rank is here; False if one is not coming."""
        return self._lane.session.goodbye(self._meet).together

    def _meet(self) -> None:
        while self._on and self._under_way:
            self._read()
        compare(self._lane, "close()")

    def _first_bad(self) -> tuple[int, int]:
        """The first parameter with NaN or Inf, and how many of its elements; -1 if none has."""
        if not self._num_bad or self._paused:
            return -1, 0
        device = self._num_bad[0][1].device
        counts = torch.stack([count.to(device) for _, count in self._num_bad]).tolist()
        bad = ((index, count) for (index, _), count in zip(self._num_bad, counts, strict=True) if count)
        return next(bad, (-1, 0))

    def _read(self) -> Callable[[], None]:
        step, header = self._under_way.popleft()
        headers = header.receive(_PATIENCE_S)
        found = nonfinite(headers, self._names, self._lane.groups.ranks)
        if found is not None:
            self.health_log.tell(step, "nonfinite", found.text, found.ranks, found.parameter, found.num_elements)
            say(f"{self._lane.place()} in step {step} {found.text}")
        return self._drift_monitor.hear(headers, self._lane)
