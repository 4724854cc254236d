"""Accelerate: `prepare` takes the place of `accelerator.prepare`, and gradsync that of DDP.

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, plan=gs.Plan())

Under a launcher Accelerate wraps the model in DDP. Our hook on that DDP could compress, but knows no paces, no NaN and
no uneven inputs (docs/ddp.md). So the wrapper is left out, by a switch that Accelerate has (`evaluation_mode`: all of
its preparation but the wrapper), and the model is attached; see [What Accelerate asks of a model].

Note [Why not register_for_checkpointing]
    It keeps what rank 0 has and unpickles it. Hooks of `save_state` and `load_state` run on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync.engine.handle import GradSync
from gradsync.integrations import rank_files
from gradsync.integrations.without_ddp import Accelerator, NoSync, attach_prepared, check, refuse_wrapped
from gradsync.plan.auto import Auto
from gradsync.plan.guard import Guard
from gradsync.plan.sync_plan import Plan


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    plan: Plan | Auto | None = None,
    guard: Guard | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Any:
    """Return what `accelerator.prepare(*objects)` returns, with each model attached instead of wrapped.

    Several models become several GradSyncs, each with the optimizers over its own parameters; `sync_of(model)` has it.
    `accelerator.save_state` and `load_state` carry its state. `plan`, `guard` and `trace` are those of `gs.attach`.
    """
    check(accelerator, plan, guard, accelerator.gradient_accumulation_steps)
    for each in objects:
        refuse_wrapped(each)
    places = [index for index, each in enumerate(objects) if isinstance(each, torch.nn.Module)]
    # Models first: an optimizer's state follows them to their device.
    models = {index: accelerator.prepare_model(objects[index], evaluation_mode=True) for index in places}
    others = _prepare(accelerator, [each for index, each in enumerate(objects) if index not in models])
    optimizers = [each for each in others if isinstance(each, Optimizer)]
    for model in models.values():
        if any(param.requires_grad for param in model.parameters()):
            _keep(accelerator, attach_prepared(accelerator, model, optimizers, plan, guard, trace))
    rest = iter(others)
    result = tuple(models[index] if index in models else next(rest) for index in range(len(objects)))
    return result if len(result) != 1 else result[0]


def sync_of(model: torch.nn.Module) -> GradSync:
    """The GradSync of a model that went through `prepare`: its stats, `join()`, `drain()`, `detach()`."""
    sync = _sync_of(model)
    if sync is None:
        raise ValueError(
            f"{type(model).__name__} is not attached; give it to gradsync.integrations.accelerate.prepare, and ask "
            "for the model that it returns"
        )
    return sync


def _sync_of(model: torch.nn.Module) -> GradSync | None:
    no_sync = getattr(model, "no_sync", None)
    return no_sync.sync if isinstance(no_sync, NoSync) else None


def _prepare(accelerator: Accelerator, objects: list[Any]) -> list[Any]:
    if not objects:
        return []
    prepared = accelerator.prepare(*objects)
    return [prepared] if len(objects) == 1 else list(prepared)


def _keep(accelerator: Accelerator, sync: GradSync) -> None:
    """Let `save_state` and `load_state` carry its state."""

    def save(models: list[torch.nn.Module], weights: Any, folder: str) -> None:
        if (name := _name(sync, models)) is not None:
            rank_files.save(sync, Path(folder), name)

    def load(models: list[torch.nn.Module], folder: str) -> None:
        if (name := _name(sync, models)) is not None:
            rank_files.load(sync, Path(folder), name)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _name(sync: GradSync, models: Sequence[torch.nn.Module]) -> str | None:
    """The name follows from the model's place among those that Accelerate keeps; None if it keeps it no more."""
    syncs = [each for each in map(_sync_of, models) if each is not None]
    return f"gradsync{syncs.index(sync) or ''}" if sync in syncs else None
