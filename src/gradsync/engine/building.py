"""What one plan runs with, and the making of it: at attach, and again when `gs.auto()` changes the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.engine.inventory import Inventory
from gradsync.engine.opening import Opened, Papers, open_shipping
from gradsync.engine.pacing import open_pace
from gradsync.engine.reducer import Reducer
from gradsync.engine.replicas import Buffers
from gradsync.engine.watch import Watch
from gradsync.guard.findings import Findings
from gradsync.pace.contract import Pace, Site
from gradsync.plan import Plan
from gradsync.policy import Guard
from gradsync.trace import Recorder


class Engine(NamedTuple):
    """What one plan runs with; another plan needs another."""

    plan: Plan
    reducer: Reducer
    pace: Pace

    @property
    def listens(self) -> bool:
        """Whether it has anything to do with one rank alone."""
        return self.reducer.lane.groups.size > 1 or self.pace.k > 1 or not self.pace.engine_averages


@dataclass(frozen=True)
class Builder:
    """What stays the same when the plan changes."""

    parent: dist.ProcessGroup
    optimizers: Sequence[Optimizer]
    inventory: Inventory
    buffers: Buffers
    guard: Guard
    scaler: GradScaler | None
    always: bool
    findings: Findings
    watch: Watch
    terms: dict[str, Any]  # beside the plan, what must be the same on every rank

    def open(self, plan: Plan, refusal: Exception | None = None) -> Opened:
        """Agree, and make what gradients travel by; every rank calls this at once."""
        papers = Papers(self.inventory.table(self.optimizers), plan.canonical() | self.terms, refusal)
        return open_shipping(self.parent, plan, self.guard, self.inventory, papers, self.always)

    def build(self, plan: Plan, opened: Opened) -> Engine:
        """The rest; likewise, with equal parameters."""
        lane, exact, shipping = opened
        entries = self.inventory.entries
        parameters: list[tuple[str, torch.nn.Parameter]] = [(entry.name, entry.param) for entry in entries]
        recorder, limit = Recorder(), plan.bucket_bytes
        site = Site(
            lane, exact, shipping, parameters, self.optimizers, self.buffers, self.guard, limit, len(entries), count(),
            recorder, self.findings, self.watch,
        )  # fmt: skip
        pace = open_pace(plan, site, self.parent, self.scaler)
        lane.describe = pace.describe
        idle = not pace.engine_averages
        reducer = Reducer(
            entries, lane, exact, shipping, plan, self.guard, self.buffers, recorder, self.findings, self.watch, pace.k,
            idle,
        )  # fmt: skip
        return Engine(plan, reducer, pace)
