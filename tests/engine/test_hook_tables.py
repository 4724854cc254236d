"""The table of a parameter's hooks: autograd calls ours, or all others where nobody else does; handles find theirs."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from gradsync.agreement.header import Mark
from gradsync.engine.bucket import GradEntry
from gradsync.engine.user_hooks import GradientHook, ParameterHooks, UserHooks, hook_on, hooked, ignore
from gradsync.pace.contract import Pace


class Observing(GradientHook):
    """An observer's hook."""

    observes = True


def parameter() -> tuple[nn.Parameter, ParameterHooks, list[str]]:
    """One whose hooks are in a table of ours, and what was called at it."""
    param, called = nn.Parameter(torch.ones(1)), list[str]()
    table = ParameterHooks(OrderedDict())
    param._post_accumulate_grad_hooks = table  # type: ignore[attr-defined]
    return param, table, called


def backward(param: nn.Parameter, called: list[str]) -> list[str]:
    """What autograd calls now, in order."""
    called.clear()
    (param * 1).sum().backward()
    return list(called)


def test_autograd_calls_the_others_only_while_no_gradsync_is_attached() -> None:
    param, table, called = parameter()
    first = param.register_post_accumulate_grad_hook(lambda _: called.append("first"))
    assert backward(param, called) == ["first"]
    ours = GradientHook(lambda _: called.append("ours"))
    handle = param.register_post_accumulate_grad_hook(ours)
    assert hook_on(param) is ours
    assert backward(param, called) == ["ours"]
    second = param.register_post_accumulate_grad_hook(lambda _: called.append("second"))
    assert backward(param, called) == ["ours"]
    assert len(table.others) == 2
    assert all(each.id in table for each in (first, second, handle))
    handle.remove()
    assert backward(param, called) == ["first", "second"]
    first.remove()
    assert backward(param, called) == ["second"]
    second.remove()
    assert backward(param, called) == []
    assert hook_on(param) is None
    assert not any(each.id in table for each in (first, second, handle))


def test_an_observer_takes_nothing_from_the_others() -> None:
    param, table, called = parameter()
    param.register_post_accumulate_grad_hook(lambda _: called.append("other"))
    observer = param.register_post_accumulate_grad_hook(Observing(lambda _: called.append("observer")))
    assert sorted(backward(param, called)) == ["observer", "other"]
    told: list[str] = []
    table.added = lambda: told.append("added")
    observer.remove()
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert told == ["added"], "who is attached goes on being told"
    ours = param.register_post_accumulate_grad_hook(GradientHook(ignore))
    ours.remove()
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert told == ["added"], "and is not, once it is detached"


def test_a_copy_of_a_parameter_has_no_hooks_and_that_of_a_hook_does_nothing() -> None:
    param, table, called = parameter()
    param.register_post_accumulate_grad_hook(lambda _: called.append("other"))
    assert copy.deepcopy(table) == OrderedDict()
    assert pickle.loads(pickle.dumps(table)) == OrderedDict()  # noqa: S301
    hook = GradientHook(lambda _: called.append("ours"))
    for each in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):  # noqa: S301
        assert isinstance(each, GradientHook)
        each(param)
    assert called == []


class Averaging(Pace):
    """The engine averages, or each rank applies its own, as a test says."""

    def after_backward(self, count: int, aborted: Any) -> bool:
        return False


def user_hooks(num: int) -> tuple[list[GradEntry], UserHooks, list[int]]:
    """Parameters with a hook each, that notes its number, and names of which the check was told."""
    entries = [GradEntry(i, f"p{i}", nn.Parameter(torch.ones(1)), {}, "", False) for i in range(num)]
    called: list[int] = []
    hooks = UserHooks(entries, ignore)
    for number, entry in reversed(list(enumerate(entries))):
        hooks.take_over(entry)
        entry.param.register_post_accumulate_grad_hook(lambda _, number=number: called.append(number))
        entry.param.grad = torch.ones(1)
    return entries, hooks, called


def test_hooks_are_called_in_one_order_for_what_was_brought_and_once() -> None:
    entries, hooks, called = user_hooks(3)
    assert hooked(entries) == ["p0", "p1", "p2"]
    hooks.bring(bytes([1, 0, 1]))
    hooks.deliver()
    assert called == [0, 2]
    hooks.deliver()
    assert called == [0, 2]
    entries[0].param.grad = None
    hooks.bring(bytes([1, 1, 0]))
    hooks.deliver()
    assert called == [0, 2, 1], "not where there is no gradient"
    assert not hooks.delivering


def test_who_applies_its_own_hears_of_what_its_backward_brought() -> None:
    entries, hooks, called = user_hooks(2)
    pace, marks = Averaging(), bytearray([Mark.TRAINABLE, Mark.TRAINABLE | Mark.USED])
    for engine_averages, replicas_differ, aborted, expected in (
        (True, True, False, []),
        (True, False, False, []),
        (False, True, False, [1]),
        (False, True, True, []),
        (False, False, False, [0, 1]),  # of all that have a gradient: the pace has put the average there
        (False, False, True, [0, 1]),
    ):
        pace.engine_averages, pace.replicas_differ = engine_averages, replicas_differ
        called.clear()
        hooks.bring(bytes([1, 1]))
        hooks.expect(pace, marks, aborted)
        hooks.deliver()
        assert called == expected
    assert len(entries) == 2


def test_a_hook_that_raises_leaves_nothing_half_done() -> None:
    entries, hooks, _ = user_hooks(1)
    states: list[tuple[bool, bool]] = []

    def refuse(param: torch.Tensor) -> None:
        states.append((hooks.delivering, torch.is_grad_enabled()))
        raise ArithmeticError

    entries[0].param.register_post_accumulate_grad_hook(refuse)
    hooks.bring(bytes([1]))
    try:
        hooks.deliver()
    except ArithmeticError:
        states.append((hooks.delivering, torch.is_grad_enabled()))
    assert states == [(True, False), (False, True)]


def test_hooks_that_were_there_before_are_taken_over_and_checked_by_name() -> None:
    entry = GradEntry(0, "weight", nn.Parameter(torch.ones(1)), {}, "", False)
    bare = GradEntry(1, "bias", nn.Parameter(torch.ones(1)), {}, "", False)
    called: list[str] = []
    entry.param.register_post_accumulate_grad_hook(lambda _: called.append("before"))
    assert hooked([entry, bare]) == ["weight"]
    checked: list[str] = []
    hooks = UserHooks([entry, bare], checked.append)
    for each in (entry, bare):
        hooks.take_over(each)
        hooks.take_over(each)
    assert checked == ["weight", "weight"]
    assert list(hooks.by_parameter) == [0]
    assert called == []
    bare.param.register_post_accumulate_grad_hook(lambda _: called.append("late"))
    assert checked == ["weight", "weight", "bias"]
    for each in (entry, bare):
        each.param.register_post_accumulate_grad_hook(GradientHook(ignore))
    assert hooked([entry, bare]) == ["weight", "bias"]
