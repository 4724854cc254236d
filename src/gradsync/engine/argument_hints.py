"""A guess at what was meant by who gave `attach` something else than a model, an optimizer or a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync.plan.auto import Auto
from gradsync.plan.guard import Guard
from gradsync.plan.sync_plan import Plan


def not_a_model(value: object) -> str:
    """
    >>> not_a_model([torch.nn.Linear(2, 2)])
    'attach takes a torch.nn.Module, got list (put several modules into one torch.nn.ModuleList)'
    """
    hint = ""
    if isinstance(value, Optimizer):
        hint = " (the model comes first: gs.attach(model, optimizer))"
    elif isinstance(value, type):
        hint = f" {value.__name__} (make one first: model = {value.__name__}(...))"
    elif isinstance(value, Iterator):
        hint = " (pass the model itself, not its parameters)"
    elif isinstance(value, list | tuple):
        hint = " (put several modules into one torch.nn.ModuleList)"
    return f"attach takes a torch.nn.Module, got {_kind(value)}{hint}"


def not_an_optimizer(value: object) -> str:
    """
    >>> not_an_optimizer(Plan())
    'attach takes torch optimizers, got Plan (the plan comes third: gs.attach(model, optimizer, plan), or plan=...)'
    """
    hint = ""
    if isinstance(value, Plan | Auto):
        hint = " (the plan comes third: gs.attach(model, optimizer, plan), or plan=...)"
    elif isinstance(value, type) and issubclass(value, Optimizer):
        hint = f" {value.__name__} (make one first: optimizer = {value.__name__}(model.parameters(), lr=...))"
    elif isinstance(value, LRScheduler):
        hint = " (pass what it schedules: scheduler.optimizer)"
    elif isinstance(value, torch.Tensor | Iterator):
        hint = " (pass the optimizer that was made from the model's parameters, not parameters)"
    elif isinstance(value, Mapping):
        hint = " (pass a list: list(optimizers.values()))"
    elif isinstance(value, GradScaler):
        hint = " (did you mean scaler=...?)"
    elif isinstance(value, Guard):
        hint = " (did you mean guard=...?)"
    elif isinstance(getattr(value, "optimizer", None), Optimizer):
        hint = " (pass the optimizer inside of it)"
    return f"attach takes torch optimizers, got {_kind(value)}{hint}"


def _kind(value: object) -> str:
    return "the class" if isinstance(value, type) else type(value).__name__
