"""Notice what changed in a model after attach: a parameter nobody averages would let replicas drift apart.

Looked at before every forward, so only identities and counts are compared, no names are built.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, MutableMapping, Sized
from typing import NoReturn

import torch
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.engine.inventory import clean
from gradsync.engine.scripted import buffers_of, children_of, parameters_of
from gradsync.errors import GradSyncError


class Census:
    """What the model consisted of at attach."""

    def __init__(self, model: torch.nn.Module, entries: list[Entry], ignored: set[int], buffers: bool) -> None:
        """`buffers`: whether the model's buffers are to be kept equal."""
        self._entries = entries
        self._keeps_buffers = buffers
        self._buffers: set[str] | None = None  # their names, once noted
        self.place: Callable[[], str] = str  # where this rank is, for errors
        self._known = {id(entry.param) for entry in entries} | ignored
        self._model = weakref.ref(model)
        self._note_modules(model)
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
                self._look_again(entry.name)
        for modules, key, child in self._children:
            if modules.get(key) is not child:
                self._look_again(key)
        for table, count in self._counts:
            if len(table) != count:
                self._look_again("the model")
        for buffers, key in self._vacant:
            if buffers.get(key) is not None:
                self._look_again("the model")
        for entry, dtype, device in self._forms:
            if entry.param.dtype != dtype or entry.param.device != device:
                now = f"{entry.param.dtype} on {entry.param.device}"
                self._raise(f"parameter {entry.name} was {dtype} on {device} at attach and is {now} now")

    def _look_again(self, where: str) -> None:
        """Something is not where it was: raise what became of it. Modules without parameters may come and go."""
        model = self._model()
        assert model is not None
        names = {id(param): clean(name) for name, param in model.named_parameters()}
        new = [name for key, name in names.items() if key not in self._known]
        gone = [entry.name for entry in self._entries if id(entry.param) not in names]
        renamed = [(e.name, names[id(e.param)]) for e in self._entries if names.get(id(e.param), e.name) != e.name]
        if gone and new:
            self._raise(f"{_several(gone)} replaced after attach by {', '.join(new[:3])}, which nobody averages")
        if new:
            self._raise(f"{_several(new)} added after attach, and nobody averages what came later")
        if gone:
            self._raise(f"{_several(gone)} taken out of the model after attach")
        if renamed:
            before, now = renamed[0]
            self._raise(
                f"parameter {before} is called {now} since attach, as pruning, parametrizations and wrappers rename: "
                "checkpoints would not find it, and buffers that came with it would not be kept equal"
            )
        if any(entry.owner.get(entry.key) is not entry.param for entry in self._entries):
            self._raise(f"{where} holds other modules since attach")
        self._note_modules(model)

    def _note_modules(self, model: torch.nn.Module) -> None:
        """These are its modules now."""
        modules = list(model.modules())
        self._children = [(table, key, child) for table in map(children_of, modules) for key, child in table.items()]
        self._counts: list[tuple[Sized, int]] = [
            (table, len(table)) for m in modules for table in (parameters_of(m), children_of(m))
        ]
        self._vacant: list[tuple[MutableMapping[str, torch.Tensor | None], str]] = []
        if self._keeps_buffers:
            tables = [buffers_of(m) for m in modules]
            self._counts += [(table, len(table)) for table in tables]
            self._vacant = [(table, key) for table in tables for key, value in table.items() if value is None]
            self._note_buffers({clean(name) for name, _ in model.named_buffers(remove_duplicate=False)})

    def _note_buffers(self, names: set[str]) -> None:
        """These are its buffers now; what came later is each rank's own, which may be meant: said, and no error."""
        late = sorted(names - self._buffers) if self._buffers is not None else []
        self._buffers = names
        if late:
            warnings.warn(
                f"{self.place()} {_several(late, 'buffer')} added after attach: each rank keeps its own, while those "
                "of before are rank 0's on every rank. If they have to be equal, attach once they are there; if none "
                'has to, gs.attach(..., buffers="none")',
                stacklevel=6,
            )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer is about to apply a gradient that nobody averaged."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._known and param.grad is not None:
                    shape = tuple(param.shape)
                    self._raise(f"{type(optimizer).__name__} got a parameter of shape {shape} after attach")

    def check_assigned(self) -> None:
        """Raise if the optimizer is about to apply a gradient of `torch.autograd.grad` that the user has assigned."""
        for entry in self._entries:
            if entry.param.grad is not None and entry.param.grad.requires_grad:
                raise GradSyncError(
                    f"{self.place()} the .grad of parameter {entry.name} was assigned, with its graph, and no backward "
                    "has brought it, so nobody averages it: call backward() on the loss, or average each yourself, "
                    "param.grad = gs.all_reduce(grad.detach())"
                )

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

    def _raise(self, what: str) -> NoReturn:
        raise GradSyncError(
            f"{self.place()} {what}; call sync.detach() before you change the model, and attach again after"
        )


def _several(names: list[str], what: str = "parameter") -> str:
    """
    >>> _several(["a.weight"]), _several(["a.weight", "a.bias", "b.weight", "b.bias"])
    ('parameter a.weight was', 'parameters a.weight, a.bias, b.weight and 1 more were')
    """
    if len(names) == 1:
        return f"{what} {names[0]} was"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}s {', '.join(names[:3])}{more} were"
