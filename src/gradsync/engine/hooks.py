"""Where we touch autograd, modules and optimizers: hooks that call back, and can be taken off again.

Note [Three phases]
    Two GradSyncs may share one backward (a generator and a discriminator), and their end-of-backward
    callbacks may run in another order on another rank. If the first waited before the second had launched,
    ranks could wait for each other for ever. So the end of backward has phases, each a callback that queues
    the next: autograd runs all callbacks of one phase before those they queued. Phase one only launches.

Note [Who begins a backward]
    A gradient hook on the outputs of the root forward. Queued from a parameter's hook instead, the callback
    would fire once per segment under reentrant checkpointing; that is only the fallback, for models whose
    parts are called one by one, and for compiled ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.variable import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsync.engine.bucket import Entry


class Listener(Protocol):
    """What the hooks call."""

    def before_forward(self) -> None: ...
    def backward_begins(self) -> None: ...
    def arrived(self, entry: Entry, param: torch.Tensor) -> None: ...
    def before_step(self, optimizer: Optimizer) -> None: ...


class Hooks:
    """All hooks of one GradSync."""

    def __init__(self, listener: Listener, model: torch.nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._listener = listener
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]
        self._handles += [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]
        self._hooked: set[int] = set()

    def listen(self, entries: Iterable[Entry]) -> None:
        """Hear of the gradients of those that require one."""
        for entry in entries:
            if entry.param.requires_grad and entry.index not in self._hooked:
                hook = GradientHook(self._listener.arrived, entry)
                self._handles.append(entry.param.register_post_accumulate_grad_hook(hook))
                self._hooked.add(entry.index)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_forward(self, module: torch.nn.Module, args: object) -> None:
        # While a compiler traces the model, a hook must not leave a trace: see [Who begins a backward].
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_backward():
            self._listener.before_forward()

    def _after_forward(self, module: torch.nn.Module, args: object, output: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begins)

    def _begins(self, grad: torch.Tensor) -> None:
        self._listener.backward_begins()

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not in_backward():
            self._listener.before_step(optimizer)


class GradientHook(partial[None]):
    """A parameter's hook, of a type of its own so that a second attach recognizes it."""


def in_backward() -> bool:
    """Whether this thread is inside a backward (as forward is when checkpointing recomputes it)."""
    return torch._C._current_graph_task_id() != -1


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward under way has ended, before `backward()` returns."""
    Variable._execution_engine.queue_callback(callback)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what a forward returned: tuples, lists, mappings and dataclass-like outputs."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple | set):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))
