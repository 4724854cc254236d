"""The users' own post-accumulate hooks: called when the average is there, not when the local gradient is.

Such a hook steps an optimizer, say, as soon as `.grad` is there, and sets it to None. Called by autograd it would apply
what only this rank has, and find nothing where a bucket has taken the gradient already.

Note [Whose hooks autograd calls]
    A parameter keeps its hooks in a dict, of which autograd calls the values; a handle removes by key from the dict it
    was made for. Ours is a dict too, and stands in that one's place. As one of C it holds our hook alone, so autograd
    calls nothing else; asked in Python it files everybody else's under `others`, whose hooks we call. What was there
    before attach is `others` itself, so handles of then and of now both go on removing. After detach it holds a hook
    that calls the others, at the moment at which autograd would.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gradsync.agreement.header import Mark
from gradsync.engine.bucket import GradEntry
from gradsync.pace.contract import Pace

Hook = Callable[[torch.Tensor], Any]
_RELAY, _OPTIMIZER = -1, -2  # keys; torch's handles count from 0
APPLY_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"  # the module


class GradientHook(partial[None]):
    """A parameter's hook, of a type of its own so that a second attach recognizes it."""

    observes = False  # of an observer, not of a GradSync

    def __deepcopy__(self, memo: object) -> GradientHook:
        return GradientHook(ignore)

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientHook, (ignore,)


def hook_on(param: torch.Tensor) -> GradientHook | None:
    """Our own hook on a parameter, if there is one."""
    hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
    return next((hook for hook in hooks if isinstance(hook, GradientHook)), None)


class ParameterHooks(OrderedDict[int, Hook]):
    """All hooks of one parameter; see [Whose hooks autograd calls]."""

    def __init__(self, others: OrderedDict[int, Hook]) -> None:
        super().__init__()
        self.others = others
        self.added: Callable[[], None] = ignore  # told of each of the others

    def __setitem__(self, key: int, hook: Hook) -> None:
        if isinstance(hook, GradientHook):
            super().__setitem__(key, hook)
        else:
            self.added()
            self.others[key] = hook
        self._relay()

    def __delitem__(self, key: int) -> None:
        if key in self.others:
            del self.others[key]
        else:
            hook = self[key]
            super().__delitem__(key)
            if isinstance(hook, GradientHook) and not hook.observes:
                self.added = ignore
        self._relay()

    def _relay(self) -> None:
        """Let autograd call the others where nobody else does: there are some, and no GradSync is attached."""
        attached = any(isinstance(hook, GradientHook) and not hook.observes for hook in self.values())
        if super().__contains__(_RELAY):
            super().__delitem__(_RELAY)
        if self.others and not attached:
            super().__setitem__(_RELAY, partial(_call_all, self.others))

    def __contains__(self, key: object) -> bool:
        return key in self.others or super().__contains__(key)

    # A copy has no hooks, as that of a parameter.

    def __deepcopy__(self, memo: object) -> OrderedDict[int, Hook]:
        return OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


class UserHooks:
    """The user's hooks on one model's parameters."""

    def __init__(self, entries: Sequence[GradEntry], check: Callable[[str], None]) -> None:
        """`check` raises where a hook of the parameter of this name cannot be served."""
        self.delivering = False  # inside a user's hook
        self.by_parameter: dict[int, OrderedDict[int, Hook]] = {}  # of those that had any, by index
        self._brought = b""  # not 0 for parameters of which a gradient has come, and hooks have not been called
        self._check = check
        self._entries = entries

    def take_over(self, entry: GradEntry) -> None:
        """Let autograd call only our hook at this parameter from now on."""
        hooks: Any = entry.param._post_accumulate_grad_hooks
        if not isinstance(hooks, ParameterHooks):
            hooks = ParameterHooks(OrderedDict() if hooks is None else hooks)
            entry.param._post_accumulate_grad_hooks = hooks
        hooks.added = partial(_added, weakref.ref(self), entry.index)  # see [Who keeps whom] in hooks.py
        if hooks.others:
            hooks.added()

    def take_over_optimizers(self) -> None:
        """Take over what torch's `_apply_optimizer_in_backward` hung on the graph; called before each backward."""
        for entry, handles in optimizers_in_backward(self._entries):
            while handles:
                handles.pop().remove()
            hooks = entry.param._post_accumulate_grad_hooks
            if isinstance(hooks, ParameterHooks):  # else it was frozen always, and no gradient comes
                hooks[_OPTIMIZER] = _step_optimizers

    def expect(self, pace: Pace, marks: bytearray, aborted: bool = False) -> None:
        """A pace that sees to gradients itself has done so; `marks` say which this rank's backward brought."""
        self._brought = b""
        if pace.engine_averages or not self.by_parameter:
            return
        if not pace.replicas_differ:
            self._brought = bytes(entry.param.grad is not None for entry in self._entries)
        elif not aborted:  # each rank applies its own
            self._brought = bytes(mark & Mark.USED for mark in marks)

    def bring(self, used: bytes) -> None:
        """The engine has averaged the gradients of those that are not 0."""
        self._brought = used

    def deliver(self) -> None:
        """Call them for parameters whose gradient has been brought; the same on all ranks, in the same order."""
        brought, self._brought = self._brought, b""
        if not brought:
            return
        self.delivering = True
        try:
            with torch.no_grad():
                for index in sorted(self.by_parameter):
                    param = self._entries[index].param
                    if brought[index] and param.grad is not None:
                        _call_all(self.by_parameter[index], param)
        finally:
            self.delivering = False

    def note(self, index: int) -> None:
        """A hook is added to this parameter."""
        entry = self._entries[index]
        self._check(entry.name)
        self.by_parameter[index] = entry.param._post_accumulate_grad_hooks.others  # type: ignore[attr-defined]


def hooked(entries: Iterable[GradEntry]) -> list[str]:
    """The names of parameters that have hooks which are not ours."""
    entries = list(entries)
    names = [entry.name for entry, _ in optimizers_in_backward(entries)]
    for entry in entries:
        hooks = getattr(entry.param, "_post_accumulate_grad_hooks", None) or {}
        if hooks.others if isinstance(hooks, ParameterHooks) else hooks:
            names.append(entry.name)
    return names


def optimizers_in_backward(entries: Iterable[GradEntry]) -> Iterator[tuple[GradEntry, list[Any]]]:
    """Parameters that torch's `_apply_optimizer_in_backward` steps, and the handles of its hooks."""
    handles: Any = getattr(sys.modules.get(APPLY_IN_BACKWARD), "param_to_optim_hook_handle_map", None)
    for entry in entries if handles else ():
        if handles.get(entry.param):
            yield entry, handles[entry.param]


def _step_optimizers(param: torch.Tensor) -> None:
    """Do what torch's own hook does."""
    for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    param.grad = None


def _added(reference: weakref.ref[UserHooks], index: int) -> None:
    user_hooks = reference()
    if user_hooks is not None:
        user_hooks.note(index)


def _call_all(others: OrderedDict[int, Hook], param: torch.Tensor) -> None:
    for hook in list(others.values()):
        hook(param)


def ignore(*_: object) -> None: ...
