"""Which pace a plan asks for, at work."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer

from gradsync import paces
from gradsync.pace.async_sgd import Async
from gradsync.pace.contract import Pace, Site
from gradsync.pace.delayed import Late
from gradsync.pace.diloco import Outer
from gradsync.pace.gossip import Gossip
from gradsync.pace.learning_rates import LearningRates
from gradsync.pace.local import Local
from gradsync.pace.window import Window
from gradsync.paces import Accumulate, Delayed, EveryStep, LocalSGD
from gradsync.plan import Plan
from gradsync.policy import Guard
from gradsync.transport.groups import group_timeout
from gradsync.transport.lane import NET_S


def check_pace(plan: Plan, guard: Guard, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what the pace cannot work with."""
    if isinstance(plan.pace, EveryStep | Accumulate):
        return
    name = paces.canonical(plan.pace)["kind"]
    if not optimizers:
        raise ValueError(
            f"{name} acts after the optimizer's steps: pass the optimizer, gs.attach(model, optimizer, plan)"
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(f"LBFGS runs several backwards in one step, and {name} counts backwards; use gs.every_step()")
    if guard.nonfinite == "skip" and not isinstance(plan.pace, Delayed):
        raise ValueError(
            f'nonfinite="skip" drops a step on every rank, but with {name} a step is each rank\'s own; '
            'use gs.Guard(nonfinite="raise")'
        )


def check_hooked(plan: Plan, names: Sequence[str]) -> None:
    """Refuse post-accumulate hooks, of the parameters of these names, where the optimizer must step by itself."""
    if names and isinstance(plan.pace, paces.AsyncSGD):
        raise ValueError(
            f"parameter {names[0]} has a post-accumulate hook, but async_sgd sends gradients to their owners in "
            "optimizer.step(), which an optimizer in such a hook would keep from them: remove it, or use another pace"
        )


def open_pace(plan: Plan, site: Site, parent: dist.ProcessGroup, scaler: GradScaler | None = None) -> Pace:
    """Every rank calls this at once, with equal parameters."""
    match plan.pace:
        case EveryStep():
            return Window(plan.pace, site.parameters)
        case Accumulate():
            return Window(plan.pace, site.parameters, LearningRates(site.lane, site.optimizers, plan.pace.k))
        case LocalSGD():
            return Local(plan.pace, site, compressed=plan.compress is not None)
        case Delayed():
            return Late(plan.pace, site, plan.combine, scaler)
        case paces.DiLoCo():
            return Outer(plan.pace, site)
        case paces.AsyncSGD():
            return Async(plan.pace, site, parent, _timeout(site.guard, parent))
        case paces.Gossip():
            return Gossip(plan.pace, site, parent, _timeout(site.guard, parent) + NET_S)
    raise AssertionError(f"no pace is known for {plan.pace!r}")


def _timeout(guard: Guard, parent: dist.ProcessGroup) -> float:
    return guard.timeout if guard.timeout is not None else group_timeout(parent)
