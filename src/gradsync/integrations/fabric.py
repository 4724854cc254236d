"""Fabric: a strategy that attaches what `fabric.setup` gets, instead of wrapping it in DDP.

    fabric = L.Fabric(strategy=GradSyncStrategy(gs.Plan(compress=gs.int8())), devices=2)
    model, optimizer = fabric.setup(model, optimizer)

`fabric.backward`, `no_backward_sync`, `clip_gradients`, `save` and `load` do what they do under DDP. Several models
become several GradSyncs; `fabric.strategy.sync_of(model)` has each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.optim import Optimizer

try:
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
except ImportError as error:
    raise ImportError("gradsync.integrations.fabric needs Lightning: pip install 'gradsync[lightning]'") from error

from gradsync.engine.attach import attach, check_terms
from gradsync.engine.handle import GradSync
from gradsync.plan.auto import Auto
from gradsync.plan.guard import Guard
from gradsync.plan.sync_plan import Plan

__all__ = ["GradSyncStrategy"]

_KEY = "gradsync"  # in a checkpoint; below it the keys of the models


class GradSyncStrategy(DDPStrategy):
    """Keep the replicas of every model that is set up in step.

    Args:
        plan: How gradients travel; see `gs.Plan`, and `gs.auto()`.
        guard: Bounds on waits, what a NaN does, and replicas that differ; see `gs.Guard`.
        trace: A folder for `gradsync report`; see `gs.attach`. For one model.
        buffers: "broadcast": rank 0's BatchNorm statistics go to all; "none": each rank keeps its own.
        process_group_backend: As in Fabric's DDPStrategy; so are the next two.
        timeout: Of Fabric's own collectives. `guard` bounds ours.
        start_method: "popen" runs the script once per rank.
    """

    def __init__(
        self,
        plan: Plan | Auto | None = None,
        *,
        guard: Guard | None = None,
        trace: str | os.PathLike[str] | None = None,
        buffers: Literal["broadcast", "none"] = "broadcast",
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        check_terms(plan, guard)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        self._plan, self._guard, self._trace = plan, guard, trace
        self._buffers: Literal["broadcast", "none"] = buffers
        self._syncs: list[tuple[torch.nn.Module, GradSync]] = []
        self._backward_sync_control = _Control(self._find)

    # Setting up

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], scheduler: Any | None = None
    ) -> tuple[torch.nn.Module, list[Optimizer], Any | None]:
        self._attach(module, optimizers)
        return module, optimizers, scheduler

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Attach a model without optimizer: enough for exact averages in every step, and for one that only predicts."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._attach(module, [])
        return module

    def _attach(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        sync = attach(module, optimizers, self._plan, buffers=self._buffers, guard=self._guard, trace=self._trace)
        self._syncs.append((module, sync))

    def _find(self, module: object) -> GradSync | None:
        return next((sync for known, sync in self._syncs if known is module), None)

    def sync_of(self, module: torch.nn.Module) -> GradSync:
        """The `GradSync` of what `fabric.setup` returned, or of what it was given."""
        sync = self._find(module) or self._find(getattr(module, "module", None))
        if sync is None:
            raise ValueError(
                f"this {type(module).__name__} was not set up by this Fabric; call fabric.setup(model) first"
            )
        return sync

    def teardown(self) -> None:
        """Fabric itself never calls it: do so at the end, `fabric.strategy.teardown()`, on every rank."""
        for _, sync in self._syncs:
            sync.detach()
        self._syncs.clear()
        super().teardown()

    # Checkpoints: every rank is in these, and rank 0 writes

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        syncs = {key: sync for key, value in state.items() if (sync := self._find(value)) is not None}
        if syncs:
            state = state | {_KEY: {key: sync.state_dict(all_ranks=True) for key, sync in syncs.items()}}
        super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        remainder = super().load_checkpoint(path, state, strict, weights_only)
        if isinstance(state, dict) and state:
            for key, ours in remainder.pop(_KEY, {}).items():
                if (sync := self._find(state.get(key))) is not None:
                    sync.load_state_dict(ours)
        return remainder


class _Control(_BackwardSyncControl):
    """`fabric.no_backward_sync`."""

    def __init__(self, find: Callable[[object], GradSync | None]) -> None:
        self._find = find

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        sync = self._find(module)
        return nullcontext() if sync is None or not enabled else sync.no_sync()
