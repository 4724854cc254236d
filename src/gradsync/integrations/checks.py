"""What an observer compares between ranks: a header of our own with every sum of DDP, read one step later.

    step           7                  8                  9
    header      └─ sent ─┐         └─ sent ─┐
    read                             of 7               of 8     by then it has arrived: nobody waits

An observer can only tell: whatever it finds, DDP has averaged already.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import GradBucket
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.engine.watch import Watch
from gradsync.errors import GradSyncError
from gradsync.guard.calls import launch_header
from gradsync.guard.findings import Findings
from gradsync.guard.header import Head, Headers
from gradsync.guard.verdict import nonfinite
from gradsync.integrations.accord import compare
from gradsync.policy import Guard
from gradsync.transport.lane import Lane
from gradsync.transport.tickets import Ticket


class Checks:
    """The headers under way, and what was found."""

    def __init__(self, lane: Lane, entries: list[Entry], guard: Guard) -> None:
        self.findings = Findings(guard.max_skips)
        self.paused = False
        self._lane = lane
        self._entries = entries
        self._indices = {id(entry.param): entry.index for entry in entries}
        self._names = [entry.name for entry in entries]
        self._nonfinite = guard.nonfinite != "allow"
        self._on = lane.groups.size > 1 and (guard.drift != "off" or self._nonfinite)
        self._seen: list[Optimizer] = []
        self._optimizers: list[Optimizer] = []
        self._watch = Watch(entries, self._optimizers, None, guard, self.findings, lane.groups.size)
        self._under_way: deque[tuple[int, Ticket, torch.Tensor]] = deque()
        self._found = (-1, 0)  # the first parameter with NaN or Inf, and how many of its elements

    def know(self, optimizer: Optimizer) -> None:
        """This one steps the model: its state is compared too.

        If it steps all of it: one that has only a part (of ZeroRedundancyOptimizer, say) may have another elsewhere.
        """
        if any(optimizer is known for known in self._seen):
            return
        self._seen.append(optimizer)
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if all(id(entry.param) in stepped for entry in self._entries if entry.param.requires_grad):
            self._optimizers.append(optimizer)

    def look_at(self, bucket: GradBucket) -> None:
        """Before it is averaged: is there a NaN?"""
        if self._nonfinite and self._found[0] < 0 and not bool(bucket.buffer().sum().isfinite()):
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if count := int((~grad.isfinite()).sum()):
                    self._found = (self._indices.get(id(param), -1), count)
                    return

    def announce(self) -> None:
        """This rank's gradients are computed, and parameters at rest."""
        if not self._on or self.paused:
            return
        step, (index, count) = self._lane.step, self._found
        vitals, loss_scale = self._watch.announce()
        head = Head(step, 0, 1.0, 1, index, 1, 0, bytes(8), num_nonfinite=count, vitals=vitals, loss_scale=loss_scale)
        ticket, rows = launch_header(self._lane, head, bytearray(len(self._entries)))
        self._under_way.append((step, ticket, rows))
        self._found = (-1, 0)
        self._watch.take(step)

    def hear(self) -> None:
        """Read the header before the last; every rank is at the same place."""
        if len(self._under_way) > 1:
            self._read()()

    def said_goodbye(self) -> bool:
        """Wait until every rank is here; False if one is not coming."""
        try:
            while self._under_way:
                self._read()
            compare(self._lane, "close()")
        except GradSyncError:
            return False
        return True

    def _read(self) -> Callable[[], None]:
        step, ticket, rows = self._under_way.popleft()
        self._lane.wait(ticket)
        headers = Headers(rows)
        found = nonfinite(headers, self._names, self._lane.groups.ranks)
        if found is not None:
            self.findings.tell(step, "nonfinite", found.text, found.ranks, found.parameter, found.num_elements)
            warnings.warn(f"{self._lane.place()} in step {step} {found.text}", stacklevel=2)
        return self._watch.hear(headers, self._lane)
