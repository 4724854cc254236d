"""`attach`: look at a model and its optimizers, refuse what cannot work, agree with the others, begin."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.engine.inventory import Inventory, take_inventory
from gradsync.engine.opening import Papers, open_shipping
from gradsync.engine.pacing import check_pace, open_pace
from gradsync.engine.reducer import Reducer
from gradsync.engine.replicas import Buffers, broadcast_optimizer, broadcast_tensors
from gradsync.engine.steps import Steps
from gradsync.engine.synchronizer import GradSync
from gradsync.errors import Disagreement
from gradsync.pace.contract import Site
from gradsync.plan import Plan, not_a_plan
from gradsync.policy import Guard
from gradsync.trace import Recorder
from gradsync.transport.lane import Lane


def attach(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    plan: Plan | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    buffers: Literal["broadcast", "none"] = "broadcast",
    ignore: Iterable[str | torch.Tensor] = (),
    guard: Guard | None = None,
    scaler: GradScaler | None = None,
) -> GradSync:
    """Average the model's gradients over the ranks from now on, while backward still computes.

    In place: the model is not wrapped, and its `state_dict` keeps its keys. When `backward()` returns, every
    `.grad` holds the average. Parameters, buffers and optimizer state start as rank 0's.

    Args:
        model: The whole model, the same on every rank.
        optimizer: The optimizer or optimizers over its parameters. With it a rank whose loss touches no
            parameter still takes part, and a `step()` after `no_sync()` is caught.
        plan: How; see `Plan`. None: exact averaging, overlapped with backward.
        group: Who takes part; None: everybody.
        buffers: "broadcast": rank 0's buffers (BatchNorm statistics) go to all with every synchronization.
        ignore: Names or tensors to leave alone.
        guard: Bounds on waits, and what a NaN does; see `Guard`.
        scaler: The GradScaler of mixed precision, which `delayed(k)` must know; other paces do not ask for it.
    """
    return attach_engine(model, optimizer, plan, group, buffers, ignore, guard, always=False, scaler=scaler)


def attach_engine(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    plan: Plan | None,
    group: dist.ProcessGroup | None,
    buffers: str,
    ignore: Iterable[Any],
    guard: Guard | None,
    always: bool,
    scaler: GradScaler | None = None,
) -> GradSync:
    """As `attach`; `always` puts the hooks on even where one rank alone would need none (to measure them)."""
    plan, guard = Plan() if plan is None else plan, Guard() if guard is None else guard
    optimizers = _as_list(optimizer)
    parent = _parent(group)
    refusal: Exception | None = None
    try:
        _check_arguments(plan, guard, buffers, scaler)
        check_pace(plan, guard, optimizers)
        inventory = take_inventory(model, optimizers, ignore)
    except (TypeError, ValueError) as error:
        if dist.get_world_size(parent) == 1:
            raise
        # What was refused is not looked at again: this rank only tells the others.
        refusal, inventory, plan, guard, optimizers = error, Inventory([], [], set()), Plan(), Guard(), []
        buffers = "broadcast"
    papers = Papers(
        inventory.table(optimizers), plan.canonical() | {"buffers": buffers, "nonfinite": guard.nonfinite}, refusal
    )
    lane, exact, shipping = open_shipping(parent, plan, guard, inventory, papers, always)
    try:
        _start_alike(lane, inventory, optimizers)
    except BaseException as error:
        lane.close(together=isinstance(error, Disagreement))
        raise
    travelling = Buffers(inventory.buffers if buffers == "broadcast" else [])
    parameters = [(entry.name, entry.param) for entry in inventory.entries]
    recorder, limit = Recorder(), plan.bucket_bytes
    site = Site(
        lane, exact, shipping, parameters, optimizers, travelling, guard, limit, len(parameters), count(), recorder
    )
    pace = open_pace(plan, site, parent, scaler)
    lane.describe = pace.describe
    idle = not pace.engine_averages
    reducer = Reducer(inventory.entries, lane, exact, shipping, plan, guard, travelling, recorder, pace.k, idle)
    busy = pace.k > 1 or idle or guard.nonfinite != "allow"
    steps = Steps(model, optimizers, plan, reducer, pace, inventory.ignored, always or lane.groups.size > 1 or busy)
    return GradSync(plan, optimizers, travelling, steps)


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


def _check_arguments(plan: Plan, guard: Guard, buffers: str, scaler: GradScaler | None) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(not_a_plan(plan))
    if not isinstance(guard, Guard):
        raise TypeError(f"guard must be a gs.Guard, got {guard!r}")
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
        if differing := broadcast_optimizer(lane, optimizer, 0):
            warnings.warn(
                f"{lane.place()} {type(optimizer).__name__} had other values than rank 0 for {', '.join(differing)}; "
                "rank 0's are used",
                stacklevel=4,
            )
