"""`attach`: look at a model and its optimizers, refuse what cannot work, agree with the others, begin.

GRADSYNC_DISABLE=1: plain exact averaging, whatever the plan says, to find out whether gradsync is the problem.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.outcome import HealthLog
from gradsync.algorithms.builtin import native
from gradsync.drift.monitor import DriftMonitor
from gradsync.engine.assemble import Builder, check_hooked, check_pace
from gradsync.engine.handle import GradSync
from gradsync.engine.listeners import moments_of
from gradsync.engine.loop import StepLoop
from gradsync.engine.parameters import Inventory, take_inventory
from gradsync.engine.replicas import Buffers, broadcast_optimizer, broadcast_tensors
from gradsync.engine.trace_step import Tracing, agree_on_trace, open_tracer, wanted
from gradsync.engine.user_hooks import hooked
from gradsync.errors import Disagreement, say
from gradsync.plan.auto import PROFILING, Auto
from gradsync.plan.guard import Guard
from gradsync.plan.pace_recipe import exchange_of
from gradsync.plan.paces import every_step
from gradsync.plan.sync_plan import Plan, not_a_plan
from gradsync.transport.lane import Lane

if TYPE_CHECKING:
    from gradsync.autotune.controller import Controller

NOTICE = (
    "GRADSYNC_DISABLE is set: gradients are averaged exactly in every step, by the process group's own all-reduce, "
    "whatever the plan says"
)


def is_disabled() -> bool:
    """Return whether the variable is set, to something else than 0."""
    return os.environ.get("GRADSYNC_DISABLE", "0") not in ("", "0")


def plain(plan: Plan | Auto) -> Plan:
    """The plan without anything clever. Windows of accumulate(k) stay: the loop counts on them.

    >>> plain(Plan(bucket_bytes=4096)).algorithm
    Native()
    """
    if not isinstance(plan, Plan):
        return Plan(algorithm=native())
    pace = every_step() if exchange_of(plan.pace).window is None else plan.pace
    return replace(plan, algorithm=native(), compress=None, pace=pace, audit_every=None)


def attach(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    plan: Plan | Auto | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    buffers: Literal["broadcast", "none"] = "broadcast",
    ignore: Iterable[str | torch.Tensor] = (),
    guard: Guard | None = None,
    scaler: GradScaler | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> GradSync:
    """Average the model's gradients over the ranks from now on, while backward still computes.

    In place: the model is not wrapped, and its `state_dict` keeps its keys. When `backward()` returns, every
    `.grad` holds the average. Parameters, buffers and optimizer state start as rank 0's.

    Args:
        model: The whole model, the same on every rank.
        optimizer: The optimizer or optimizers over its parameters. With it a rank whose loss touches no
            parameter still takes part, and a `step()` after `no_sync()` is caught.
        plan: How; see `Plan`. None: exact averaging, overlapped with backward. `gs.auto()`: measure, then choose.
        group: Who takes part; None: everybody.
        buffers: "broadcast": rank 0's buffers (BatchNorm statistics) go to all with every synchronization.
        ignore: Names or tensors to leave alone.
        guard: Bounds on waits, what a NaN does, and replicas that differ; see `Guard`.
        scaler: The GradScaler of mixed precision. It then bears steps without gradients (in windows, when all ranks
            dropped one), `delayed(k)` works with it, and ranks whose scales differ are named.
        trace: A folder: every rank writes there what each step did, for `gradsync report` and `gradsync watch`. None:
            that of the environment variable GRADSYNC_TRACE, if there is one.
    """
    saved = plan.save if isinstance(plan, Auto) else None
    folder = saved if trace is None and saved is not None else wanted(trace)
    if saved is not None and folder != saved:
        raise ValueError(
            f"auto(save={str(saved)!r}) writes a trace of its own, and trace={str(folder)!r} names another folder: "
            "leave one of them out"
        )
    return attach_engine(model, optimizer, plan, group, buffers, ignore, guard, False, scaler, folder)


def attach_engine(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    plan: Plan | Auto | None,
    group: dist.ProcessGroup | None,
    buffers: str,
    ignore: Iterable[Any],
    guard: Guard | None,
    always: bool,
    scaler: GradScaler | None = None,
    trace: Path | None = None,
) -> GradSync:
    """Do what `attach` does; `always` puts the hooks on even where one rank alone needs none (to measure them)."""
    plan, guard = Plan() if plan is None else plan, Guard() if guard is None else guard
    optimizers = _as_list(optimizer)
    parent = _parent(group)
    size = dist.get_world_size(parent)
    refusal: Exception | None = None
    try:
        _check_arguments(plan, guard, buffers, scaler, size)
        if is_disabled():
            plan = plain(plan)
            if dist.get_rank(parent) == 0:
                say(NOTICE)
        auto, plan = (plan, PROFILING) if isinstance(plan, Auto) else (None, plan)
        check_pace(plan, guard, optimizers)
        inventory = take_inventory(model, optimizers, ignore)
        check_hooked(plan, hooked(inventory.entries))
    except (TypeError, ValueError) as error:
        if size == 1:
            raise
        # What was refused is not looked at again: this rank only tells the others.
        refusal, inventory, guard, optimizers = error, Inventory([], [], set()), Guard(), []
        auto, plan, buffers, scaler = None, Plan(), "broadcast", None
    if auto is not None and size == 1:
        say("auto has nothing to choose: one rank alone synchronizes nothing, and runs with the default plan")
        auto, plan = None, Plan()
    terms: dict[str, Any] = {"buffers": buffers}
    terms |= {"nonfinite": guard.nonfinite, "max_skips": guard.max_skips, "drift": guard.drift}
    terms |= {} if auto is None else {"auto": auto.canonical()}
    # One rank alone is equal to itself.
    travelling = Buffers(inventory.buffers, kept=buffers == "broadcast" and size > 1)
    health_log = HealthLog(guard.max_skips)
    drift_monitor = DriftMonitor(inventory.entries, optimizers, scaler, guard, health_log, size)
    builder = Builder(
        parent, optimizers, inventory, travelling, guard, scaler, always, health_log, drift_monitor, terms
    )
    opened = builder.open(plan, refusal)
    try:
        _start_alike(opened.lane, inventory, optimizers)
        engine = builder.build(plan, opened)
    except BaseException as error:
        if not isinstance(error, Disagreement):
            opened.lane.give_up(error)
        opened.lane.close(together=isinstance(error, Disagreement))
        raise
    listens = always or trace is not None or engine.listens or guard.nonfinite != "allow"
    steps = StepLoop(model, optimizers, engine, inventory.ignored, listens)
    controller = None if auto is None else _open_controller(auto, steps, builder, type(model).__name__)
    sync = GradSync(optimizers, travelling, steps, controller, scaler)
    if size > 1 or trace is not None:
        _open_trace(sync, steps, trace)
    return sync


def _open_trace(sync: GradSync, steps: StepLoop, folder: Path | None) -> None:
    """Open the trace; every rank calls this at once, whether it traces or not."""
    lane = steps.lane
    together, run_id = agree_on_trace(lane, folder)
    if folder is None:
        return
    tracer = open_tracer(folder, lane, steps.synchronization.entries, steps.plan.canonical(), "gradsync", run_id)
    tracer.ask(sync.stats)
    steps.trace(Tracing(tracer, lane, together))


def _open_controller(auto: Auto, steps: StepLoop, builder: Builder, name: str) -> Controller:
    # It brings the prober and more; who does not ask for `gs.auto()` need not wait for them at import.
    from gradsync.autotune.controller import Controller

    try:
        controller = Controller(auto, steps, builder, name)
    except BaseException:
        steps.close()
        steps.lane.close(together=False)
        raise
    steps.tell(**moments_of(controller))
    return controller


def _as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]  # type: ignore[list-item]


def _parent(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError("there is no process group yet; call gs.init() before gs.attach()")
    parent = dist.group.WORLD if group is None else group
    if parent is None or dist.get_rank(parent) < 0:
        raise ValueError("this rank is not a member of the group given to attach; only members may call it")
    return parent


def check_terms(plan: Plan | Auto | None, guard: Guard | None) -> None:
    """Refuse what is no plan or no guard; adapters ask before they look into them, and long before they attach."""
    if not isinstance(plan, Plan | Auto | None):
        raise TypeError(not_a_plan(plan))
    if not isinstance(guard, Guard | None):
        raise TypeError(f"guard must be a gs.Guard, got {guard!r}")


def _check_arguments(plan: Plan | Auto, guard: Guard, buffers: str, scaler: GradScaler | None, size: int) -> None:
    check_terms(plan, guard)
    if isinstance(plan, Auto) and plan.cluster is not None and plan.cluster.world_size != size:
        raise ValueError(
            f"auto: the cluster has {plan.cluster.world_size} ranks, but {size} attach; probe this one "
            "(gradsync probe), or leave cluster out"
        )
    if buffers not in ("broadcast", "none"):
        raise ValueError(f'buffers must be "broadcast" or "none", got {buffers!r}')
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r}")


def _start_alike(lane: Lane, inventory: Inventory, optimizers: list[Optimizer]) -> None:
    """Parameters, buffers and optimizers begin as rank 0's."""
    if lane.groups.size == 1:
        return
    broadcast_tensors(lane, inventory.tensors(), 0, "the model's parameters")
    for optimizer in optimizers:
        if differing := broadcast_optimizer(lane, optimizer, inventory.entries, 0):
            warnings.warn(
                f"{lane.place()} {type(optimizer).__name__} had other values than rank 0 for {', '.join(differing)}; "
                "rank 0's are used",
                stacklevel=4,
            )
