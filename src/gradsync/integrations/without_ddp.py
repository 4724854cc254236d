"""A model attached where Accelerate would have wrapped it in DDP: what its own adapter and the Trainer's share.

Note [What Accelerate asks of a model]
    `accumulate()`, `no_sync()` and the Trainer look for `model.no_sync`: it is the GradSync's. Both frameworks divide
    the loss by the number of micro-batches (or of tokens, times the ranks, since DDP takes a mean), and what no_sync()
    has added up is averaged with the last of them. Like DDP we take the mean over ranks, and nothing else is divided.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

try:
    from accelerate import Accelerator as Accelerator  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError as error:
    raise ImportError("gradsync's adapter needs Accelerate: pip install 'gradsync[accelerate]'") from error

from gradsync.engine.attach import attach, check_terms
from gradsync.engine.handle import GradSync
from gradsync.launch.init import init
from gradsync.plan.auto import Auto
from gradsync.plan.guard import Guard
from gradsync.plan.pace_recipe import exchange_of
from gradsync.plan.paces import every_step, kind_of
from gradsync.plan.sync_plan import Plan

_SERVED = ("NO", "MULTI_CPU", "MULTI_GPU")


class NoSync:
    """The `no_sync` of an attached model. That of a copy, which is not attached, does nothing."""

    def __init__(self, sync: GradSync) -> None:
        self.sync = sync

    def __call__(self) -> AbstractContextManager[None]:
        return self.sync.no_sync()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (nullcontext,)


def attach_prepared(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    plan: Plan | Auto | None,
    guard: Guard | None,
    trace: str | os.PathLike[str] | None,
) -> GradSync:
    """Attach a model that Accelerate has placed and not wrapped, with those optimizers that are its own."""
    owned = {id(param) for param in model.parameters()}
    mine = [_bare(each) for each in optimizers if all(id(p) in owned for g in each.param_groups for p in g["params"])]
    handler = accelerator.ddp_handler
    buffers: Literal["broadcast", "none"] = "none" if handler and not handler.broadcast_buffers else "broadcast"
    sync = attach(model, mine, plan, buffers=buffers, guard=guard, scaler=accelerator.scaler, trace=trace)
    model.no_sync = NoSync(sync)  # type: ignore[assignment]
    return sync


def check(accelerator: Accelerator, plan: Plan | Auto | None, guard: Guard | None, micro_batches: int) -> None:
    """Refuse what cannot work, and see to a process group; `micro_batches` is how many the framework accumulates."""
    check_terms(plan, guard)
    kind = accelerator.distributed_type.value
    if kind not in _SERVED:
        raise ValueError(
            f"Accelerate runs with {kind}, which synchronizes by itself; gradsync serves replicas that hold the whole "
            f"model: launch without it ({', '.join(_SERVED)})"
        )
    _check_pace(accelerator, plan, guard, micro_batches)
    handler = accelerator.ddp_handler
    hook = "no" if handler is None else getattr(handler.comm_hook, "value", handler.comm_hook)
    if hook != "no":
        raise ValueError(
            f"comm_hook={hook!r} is a hook of DDP, which gradsync replaces; say it in the plan, as "
            "gs.Plan(compress=gs.bf16())"
        )
    init()
    if dist.get_world_size() != accelerator.num_processes:
        raise ValueError(
            f"Accelerate trains with {accelerator.num_processes} processes, but the process group has "
            f"{dist.get_world_size()}: without a GPU pass cpu=True (Trainer: use_cpu=True)"
        )


def refuse_wrapped(model: object) -> None:
    """Gradients are never averaged twice."""
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model is under DistributedDataParallel already, and gradients would be averaged twice: give the model "
            "itself to gradsync's adapter, before Accelerate prepares it"
        )


def _check_pace(accelerator: Accelerator, plan: Plan | Auto | None, guard: Guard | None, micro_batches: int) -> None:
    pace = plan.pace if isinstance(plan, Plan) else every_step()
    exchange = exchange_of(pace)
    if exchange.window is not None and micro_batches > 1:
        raise ValueError(
            f"pace={kind_of(pace)}({exchange.window}) and gradient_accumulation_steps={micro_batches} would accumulate "
            "twice, and divide twice: leave the pace out, and let the framework accumulate"
        )
    skips = guard is not None and guard.nonfinite == "skip"
    if accelerator.scaler is not None and (exchange.some_steps_empty or skips):
        raise ValueError(
            "fp16 steps by a GradScaler, which refuses a step without gradients, as "
            f"{'Guard(nonfinite=skip)' if skips else pace} makes it at times: use bf16, or leave that out (it skips a "
            "NaN by itself)"
        )


def _bare(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer: Accelerate's wrapper has no hooks."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, Optimizer) else optimizer
