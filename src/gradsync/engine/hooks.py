"""The hooks by which we touch autograd, modules and optimizers: they call back, and can be taken off again.

Note [Who begins a backward]
    A gradient hook on the outputs of the root forward. Queued from a parameter's hook instead, the callback
    would fire once per segment under reentrant checkpointing; that is only the fallback, for models whose
    parts are called one by one, and for compiled ones.

Note [A forward that raised]
    The hook behind forward is called even then, while that exception is handled: another one than before forward, which
    may itself have been called from an `except` block. In eval mode nobody waits for a backward.

Note [Who keeps whom]
    PyTorch never collects a parameter that its own post-accumulate hook refers to: autograd keeps such hooks in C++,
    where Python's collector does not look. So ours refer to us weakly, and it is a plain attribute of the parameter
    that keeps us. That circle the collector sees: whoever drops the model without `detach()` has dropped it all, and
    who drops only the GradSync goes on training.

        model ─▶ parameter ─▶ attribute ─▶ Hooks ─▶ engine ─▶ parameter
                     └─▶ hook (C++) ┄┄weak┄┄▶┘

Note [Closures]
    `optimizer.step(closure)` runs backward inside of step. What is due before a step (to take part in what this rank's
    backward missed, to take gradients away) is then due when the closure has run, and before it returns: the
    optimizer goes on to apply `.grad`. So it gets ours, which calls the user's and then back.

Notice when every gradient arrives at the very end of backward, so that nothing can overlap: say so, once.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from types import FrameType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch.autograd.variable import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsync.engine.bucket import GradEntry
from gradsync.engine.user_hooks import GradientHook, UserHooks
from gradsync.errors import GradSyncError

_SEEN = 64  # inputs of a forward, at each level
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class HookListener:
    """The methods that hooks call; who inherits hears of what it wants to."""

    def before_forward(self) -> None: ...
    def backward_begins(self) -> None: ...
    def arrived(self, entry: GradEntry, param: torch.Tensor) -> None: ...
    def before_step(self, optimizer: Optimizer, closure: bool) -> None: ...
    def closure_ran(self, optimizer: Optimizer) -> None: ...
    def after_step(self, optimizer: Optimizer, closure: bool) -> None: ...


class ForwardListener(Protocol):
    """The methods by which somebody hears of forwards that raise: see [A forward that raised]."""

    def forward_comes(self, inputs: Iterable[torch.Tensor]) -> None: ...
    def forward_did(self, error: BaseException) -> None: ...


class Hooks:
    """All hooks of one GradSync."""

    def __init__(
        self,
        listener: HookListener,
        model: torch.nn.Module,
        optimizers: Iterable[Optimizer],
        user_hooks: UserHooks | None = None,
        aborted: ForwardListener | None = None,
    ) -> None:
        """An observer gives no `user_hooks`: parameters do not keep its hooks, which end with `model`, a wrapper that
        parameters may survive, and the users' hooks are autograd's affair."""
        self._listener = listener
        self._user_hooks = user_hooks
        self._aborted = aborted
        self._handled = id(None)  # the exception that was handled already when forward began
        self._refused = False  # whether it was our own hook that raised
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=aborted is not None),
        ]
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._before_step))
            self.handles.append(optimizer.register_step_post_hook(self._after_step))
        self._hooked: set[int] = set()
        self._heard: list[GradEntry] = []  # in the order of their hooks
        self._arrived = listener.arrived
        if user_hooks is not None:
            _inherited.add(self)

    def listen(self, entries: Iterable[GradEntry]) -> None:
        """Hear of the gradients of those that require one."""
        arrived = self._listener.arrived
        me = weakref.ref(self)
        for entry in entries:
            if entry.param.requires_grad and entry.index not in self._hooked:
                if self._user_hooks is None:
                    hook = GradientHook(weakly(arrived), entry)
                    hook.observes = True
                else:
                    hook = GradientHook(_arrived, me, len(self._heard))
                    self._heard.append(entry)
                    self._user_hooks.take_over(entry)
                    entry.param._kept_for_hooks = HookOwner(self)  # type: ignore[attr-defined]
                self.handles.append(entry.param.register_post_accumulate_grad_hook(hook))
                self._hooked.add(entry.index)

    def listen_anew(self, entries: Iterable[GradEntry]) -> None:
        """Listen to these entries anew: they have other parameters than before."""
        entries = list(entries)
        self._hooked -= {entry.index for entry in entries}
        self.listen(entries)

    def hears(self, entry: GradEntry) -> bool:
        """Return whether a gradient of this one is heard of; a parameter that is frozen keeps its hook."""
        return entry.index in self._hooked

    def remove(self) -> None:
        take_off(self.handles)
        for entry in self._heard:
            vars(entry.param).pop("_kept_for_hooks", None)

    def _before_forward(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        # While a compiler traces the model, a hook must not leave a trace: see [Who begins a backward].
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_backward():
            self._handled, self._refused = id(sys.exception()), True
            if self._aborted is not None:
                self._aborted.forward_comes(_given((*args, *kwargs.values())))
            self._listener.before_forward()
            self._refused = False

    def _after_forward(self, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            error = None if self._aborted is None else sys.exception()
            if error is not None and id(error) != self._handled:
                self._raised(module, error)
                return
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:  # a leaf would keep the hook beyond this graph
                    tensor.register_hook(self._begins)

    def _raised(self, module: torch.nn.Module, error: BaseException) -> None:
        """Tell that a forward raised: see [A forward that raised]."""
        refused, self._refused, self._handled = self._refused, False, id(None)
        if self._aborted is not None and module.training and not refused and not in_backward():
            self._aborted.forward_did(error)

    def _begins(self, grad: torch.Tensor) -> None:
        if not in_transform():
            self._listener.backward_begins()

    def _before_step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Return what `step` gets instead of its arguments, None if nothing: see [Closures]."""
        if in_backward():
            return None
        closure = _closure(args, kwargs)
        self._listener.before_step(optimizer, closure is not None)
        if closure is None:
            return None

        def heard() -> Any:
            loss = closure()
            self._listener.closure_ran(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": heard}
        return (args[0], heard, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
        if not in_backward():
            self._listener.after_step(optimizer, _closure(args, kwargs) is not None)

    # A copy of the model (EMA, torch.save) is not attached: its hooks do nothing. A saved one does not even name us, so
    # that it can be loaded where gradsync is not installed: its hooks are then methods that take anything.

    def __deepcopy__(self, memo: object) -> Hooks:
        return _silent_hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        nothing = nullcontext().__exit__
        return partial(SimpleNamespace, _before_forward=nothing, _after_forward=nothing), ()


class HookOwner:
    """A parameter's reference to our hooks; a copy or a pickle of it has nothing."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def __deepcopy__(self, memo: object) -> OrderedDict[str, object]:
        return OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


def _arrived(reference: weakref.ref[Hooks], number: int, param: torch.Tensor) -> None:
    """A gradient has been accumulated. Part of the hottest path."""
    hooks = reference()
    if hooks is None:
        raise GradSyncError(
            f"a parameter of shape {tuple(param.shape)} is attached, and nothing averages it: its attributes were "
            "cleared, which kept its GradSync; keep what attach returns, or call detach() on it first"
        )
    hooks._arrived(hooks._heard[number], param)


class _Forked(HookListener):
    """The listener in a forked child, which has its parent's shared memory and connections, and none of its threads."""

    def __init__(self, rank_pid: int) -> None:
        self._rank_pid = rank_pid

    def backward_begins(self) -> None:
        raise GradSyncError(
            f"this process (pid {os.getpid()}) was forked from the rank (pid {self._rank_pid}) that attached the "
            "model, and cannot take part in its steps; train a copy there, copy.deepcopy(model), or start it by spawn"
        )

    def arrived(self, entry: GradEntry, param: torch.Tensor) -> None:
        self.backward_begins()

    def before_step(self, optimizer: Optimizer, closure: bool) -> None:
        self.backward_begins()


_inherited: weakref.WeakSet[Hooks] = weakref.WeakSet()


def _disown() -> None:
    """Let nothing that was attached touch, in a forked child, what its parent still trains with."""
    for hooks in list(_inherited):
        hooks._listener, hooks._aborted = _Forked(os.getppid()), None
        hooks._arrived = hooks._listener.arrived


os.register_at_fork(after_in_child=_disown)


def _silent_hooks() -> Hooks:
    hooks = Hooks.__new__(Hooks)
    hooks._listener, hooks.handles, hooks._hooked, hooks._user_hooks = HookListener(), [], set(), None
    hooks._aborted, hooks._handled, hooks._refused, hooks._heard = None, id(None), False, []
    return hooks


def take_off(*lists: list[RemovableHandle]) -> None:
    """Take off these hooks: they are called no more."""
    for handles in lists:
        while handles:
            handles.pop().remove()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method while its object is there; does not keep it."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = reference()
        return None if found is None else found(*args)

    return call


def _closure(args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    """Return what `step` was given to compute the loss; the first of `args` is the optimizer itself."""
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


def recomputing() -> bool:
    """Return whether reentrant checkpointing runs a backward inside of backward just now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Return whether this thread is inside a backward (as forward is when checkpointing recomputes it)."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Return whether a transform of `torch.func` runs: what `grad` or `jacrev` derive there is added to no `.grad`."""
    level: int | None = torch._C._functorch.maybe_current_level()
    return level is not None


def refuse_compiled_autograd(place: Callable[[], str]) -> None:
    """Raise if a compiler runs the backward under way, hooks and all: it drops callbacks for backward's end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and module.in_compiled_autograd_region:
        raise GradSyncError(
            f"{place()} compiled autograd runs this backward, and does not say when it has ended: switch it off "
            "(torch._dynamo.config.compiled_autograd = False), or call backward() outside of what is compiled; "
            "torch.compile of the model or of its blocks works"
        )


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward under way has ended, before `backward()` returns."""
    Variable._execution_engine.queue_callback(callback)


def _given(inputs: Iterable[Any], depth: int = 2) -> Iterator[torch.Tensor]:
    """The tensors a forward is given; not all of large or deep inputs, since this is asked in every forward."""
    for each in islice(inputs, _SEEN):
        if isinstance(each, torch.Tensor):
            yield each
        elif depth and isinstance(each, dict):
            yield from _given(each.values(), depth - 1)
        elif depth and isinstance(each, list | tuple):
            yield from _given(each, depth - 1)
        elif depth and dataclasses.is_dataclass(each) and not isinstance(each, type):
            yield from _given((getattr(each, field.name) for field in dataclasses.fields(each)), depth - 1)


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


_IN_A_ROW = 3
_LONG_S = 5e-3  # a shorter backward has nothing to gain
_LAST_PART = 0.1


class HookTiming:
    """Hears when a backward begins, when its first gradient arrives, and when it ends."""

    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._first_at = 0.0
        self._in_a_row = 0  # backwards in which all gradients arrived at the end

    def begins(self, known: bool) -> None:
        """`known`: this is the beginning itself, not the first gradient of a backward that nobody announced."""
        self._begun_at = time.perf_counter() if known else None

    def first(self) -> None:
        self._first_at = time.perf_counter()

    def ends(self) -> None:
        """A backward has ended whose gradients could travel while it computes."""
        if self._begun_at is None or self._in_a_row >= _IN_A_ROW:
            return
        now = time.perf_counter()
        took_s = now - self._begun_at
        late = took_s > _LONG_S and now - self._first_at < _LAST_PART * took_s
        self._in_a_row = self._in_a_row + 1 if late else 0
        if self._in_a_row == _IN_A_ROW:
            warnings.warn(
                "all gradients arrive at the end of backward, so communication cannot overlap with it; "
                "if the whole model is under torch.compile, compile its blocks instead (block.compile())",
                stacklevel=2,
            )
