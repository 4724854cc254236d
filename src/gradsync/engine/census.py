"""Notice what changed in a model after attach: a parameter nobody averages would let replicas drift apart.

Looked at before every forward, so only identities and counts are compared, no names are built.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.errors import GradSyncError


class Census:
    """What the model consisted of at attach."""

    def __init__(self, model: torch.nn.Module, entries: list[Entry], ignored: set[int]) -> None:
        self._entries = entries
        self.place: Callable[[], str] = str  # where this rank is, for errors
        self._known = {id(entry.param) for entry in entries} | ignored
        self._children = [(m._modules, key, child) for m in model.modules() for key, child in m._modules.items()]
        self._counts = [(m._parameters, len(m._parameters)) for m in model.modules()]
        self.note_trainable()
        self._forms = [(entry, entry.param.dtype, entry.param.device) for entry in (entries[0], entries[-1])]

    def check_model(self) -> None:
        """Raise if a parameter was replaced, added or converted.

        A tensor in a parameter's place that is none itself is `torch.func.functional_call` at work: it puts
        the parameter back.
        """
        for entry in self._entries:
            there = entry.owner.get(entry.key)
            if there is not entry.param and (there is None or isinstance(there, torch.nn.Parameter)):
                self._raise(f"parameter {entry.name} was replaced after attach, so its gradient would not be averaged")
        for modules, key, child in self._children:
            if modules.get(key) is not child:
                self._raise(f"module {key!r} was replaced after attach, so its gradients would not be averaged")
        for parameters, count in self._counts:
            if len(parameters) != count:
                self._raise(f"a parameter was added or removed after attach (now {', '.join(parameters)})")
        for entry, dtype, device in self._forms:
            if entry.param.dtype != dtype or entry.param.device != device:
                now = f"{entry.param.dtype} on {entry.param.device}"
                self._raise(f"parameter {entry.name} was {dtype} on {device} at attach and is {now} now")

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer is about to apply a gradient that nobody averaged."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._known and param.grad is not None:
                    shape = tuple(param.shape)
                    self._raise(f"{type(optimizer).__name__} got a parameter of shape {shape} after attach")

    def note_trainable(self) -> None:
        """Which parameters require a gradient now is known."""
        self._trainable = [entry.param.requires_grad for entry in self._entries]

    def trainable_changed(self) -> bool:
        """Whether one was frozen or thawed since."""
        return [entry.param.requires_grad for entry in self._entries] != self._trainable

    def check_thawed(self, hears: Callable[[Entry], bool]) -> None:
        """Raise if a thawed parameter has a gradient that nobody heard of."""
        for entry, before in zip(self._entries, self._trainable, strict=True):
            if entry.param.requires_grad and not before and entry.param.grad is not None and not hears(entry):
                raise GradSyncError(
                    f"{self.place()} parameter {entry.name} was thawed and used before gradsync noticed, so its "
                    "gradient is not averaged; call the model itself, not its parts, in the first step after"
                )

    def _raise(self, what: str) -> None:
        raise GradSyncError(
            f"{self.place()} {what}; call sync.detach() before you change the model, and attach again after"
        )
