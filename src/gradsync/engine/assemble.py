"""The parts that one plan runs with, and the making of them: at attach, and when `gs.auto()` changes the plan.

The opening: the ranks agree, then each makes the lane, the ways and the sender that the plan asks for.

Which pace a plan asks for, at work.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer

from gradsync.agreement.attach_check import check_attach
from gradsync.agreement.header import header_nbytes
from gradsync.agreement.outcome import HealthLog
from gradsync.compress.by_parameter import idle_patterns
from gradsync.drift.monitor import DriftMonitor
from gradsync.engine.nonfinite import NonfiniteCheck, SameDataCheck
from gradsync.engine.parameters import Inventory
from gradsync.engine.replicas import Buffers
from gradsync.engine.step import Synchronization
from gradsync.errors import Disagreement
from gradsync.exchange.choose_route import ExactSum, UnfitAlgorithm
from gradsync.exchange.sender import GradientExchange, Sender, main_device, travelling_devices
from gradsync.pace.contract import Pace, PaceContext
from gradsync.plan.guard import Guard
from gradsync.plan.pace_recipe import exchange_of
from gradsync.plan.paces import kind_of
from gradsync.plan.sync_plan import Plan
from gradsync.trace import Recorder
from gradsync.transport.groups import group_timeout
from gradsync.transport.lane import Lane, open_lane


class AttachRequest(NamedTuple):
    """The request with which a rank attaches; all ranks compare it."""

    table: list[dict[str, Any]]  # of its parameters and buffers
    terms: dict[str, Any]  # the plan, and whatever else must be the same everywhere
    refusal: Exception | None = None  # what it found wrong before: the others are told


def open_sender(
    parent: dist.ProcessGroup, plan: Plan, guard: Guard, inventory: Inventory, request: AttachRequest, always: bool
) -> GradientExchange:
    """Agree and begin; every member of `parent` calls this at once, and either all go on or all raise."""
    timeout = guard.timeout if guard.timeout is not None else group_timeout(parent)
    # Control only: the groups for data wait until the ranks have agreed on which they need.
    lane = open_lane(parent, guard, timeout)
    try:
        refusal = request.refusal
        check_attach(lane, request.table, request.terms, None if refusal is None else str(refusal))
        if refusal is not None:
            raise refusal
        _warn_of_idle_rules(lane, plan, inventory)
        lane.open_team(header_nbytes(len(inventory.entries)))
        devices = {tensor.device for tensor in inventory.tensors()}
        exact = ExactSum(lane, parent, plan.algorithm, travelling_devices(parent, devices, plan))
        sender = Sender(lane, parent, exact, plan, main_device(devices), always)
    except BaseException as error:
        # These all ranks come to together: nothing is under way.
        together = error is refusal or isinstance(error, Disagreement | UnfitAlgorithm)
        if not together:
            lane.give_up(error)  # or else the others would hear that this rank left, as if its work were done
        lane.close(together)
        if isinstance(error, UnfitAlgorithm):
            raise ValueError(str(error)) from None
        raise
    return GradientExchange(lane, exact, sender)


def _warn_of_idle_rules(lane: Lane, plan: Plan, inventory: Inventory) -> None:
    idle = idle_patterns(plan.compress, [entry.name for entry in inventory.entries])
    if idle and lane.groups.rank == 0:
        warnings.warn(
            f"by_parameter: no parameter's name fits {', '.join(map(repr, idle))}; is it misspelt? The names are those "
            "of model.named_parameters()",
            stacklevel=5,
        )


def check_pace(plan: Plan, guard: Guard, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what the pace cannot work with."""
    exchange, name = exchange_of(plan.pace), kind_of(plan.pace)
    if not exchange.follows_steps:
        return
    if not optimizers:
        raise ValueError(
            f"{name} acts after the optimizer's steps: pass the optimizer, gs.attach(model, optimizer, plan)"
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(f"LBFGS runs several backwards in one step, and {name} counts backwards; use gs.every_step()")
    if guard.nonfinite == "skip" and not exchange.of_gradients:
        raise ValueError(
            f'nonfinite="skip" drops a step on every rank, but with {name} a step is each rank\'s own; '
            'use gs.Guard(nonfinite="raise")'
        )


def check_hooked(plan: Plan, names: Sequence[str]) -> None:
    """Refuse post-accumulate hooks, of the parameters of these names, where the optimizer must step by itself."""
    if names and exchange_of(plan.pace).takes_gradients:
        raise ValueError(
            f"parameter {names[0]} has a post-accumulate hook, but {kind_of(plan.pace)} sends gradients to their "
            "owners in optimizer.step(), which an optimizer in such a hook would keep from them: remove it, or use "
            "another pace"
        )


def open_pace(context: PaceContext) -> Pace:
    """Make the pace; every rank calls this at once, with equal parameters."""
    opened = context.plan.pace.open(context)
    if not isinstance(opened, Pace):
        name = type(context.plan.pace).__name__
        raise TypeError(f"{name}.open must return a gradsync.pace.contract.Pace, got {opened!r}")
    return opened


class Engine(NamedTuple):
    """The parts that one plan runs with; another plan needs others."""

    plan: Plan
    synchronization: Synchronization
    pace: Pace
    recorder: Recorder
    drift_monitor: DriftMonitor

    @property
    def listens(self) -> bool:
        """True if it has anything to do with one rank alone."""
        return self.synchronization.lane.groups.size > 1 or self.pace.k > 1 or not self.pace.engine_averages


@dataclass(frozen=True)
class Builder:
    """A builder of engines, with what stays the same when the plan changes."""

    parent: dist.ProcessGroup
    optimizers: Sequence[Optimizer]
    inventory: Inventory
    buffers: Buffers
    guard: Guard
    scaler: GradScaler | None
    always: bool
    health_log: HealthLog
    drift_monitor: DriftMonitor
    terms: dict[str, Any]  # beside the plan, what must be the same on every rank

    def open(self, plan: Plan, refusal: Exception | None = None) -> GradientExchange:
        """Agree, and make what gradients travel by; every rank calls this at once."""
        request = AttachRequest(self.inventory.table(self.optimizers), plan.canonical() | self.terms, refusal)
        return open_sender(self.parent, plan, self.guard, self.inventory, request, self.always)

    def build(self, plan: Plan, opened: GradientExchange) -> Engine:
        """Make the rest of the engine; every rank calls this at once, with equal parameters."""
        lane, exact, sender = opened
        entries = self.inventory.entries
        parameters: list[tuple[str, torch.nn.Parameter]] = [(entry.name, entry.param) for entry in entries]
        recorder = Recorder()
        context = PaceContext(
            plan, self.parent, lane, exact, sender, parameters, self.optimizers, self.scaler, self.buffers, self.guard,
            len(entries), count(), recorder, self.health_log, self.drift_monitor,
        )  # fmt: skip
        pace = open_pace(context)
        lane.name_buckets(pace.describe)
        idle = not pace.engine_averages
        synchronization = Synchronization(
            entries, opened, plan, self.guard, self.buffers, self.health_log, pace.k, idle
        )
        self._listen(synchronization, recorder)
        return Engine(plan, synchronization, pace, recorder, self.drift_monitor)

    def _listen(self, synchronization: Synchronization, recorder: Recorder) -> None:
        """Add those who hear of every synchronization, in this order."""
        lane, listeners = synchronization.lane, synchronization.listeners
        on_device = any(not channel.on_host for channel in lane.groups.data.values())
        listeners.add(settling=partial(recorder.start_waiting, on_device), came=recorder.finish_synchronization)
        if self.guard.nonfinite != "allow":
            NonfiniteCheck(synchronization)
        if lane.groups.size > 1:
            SameDataCheck(synchronization)
        self.drift_monitor.listen(listeners, lane)
