"""A profile of a real model: what it holds, whatever the step does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import gradsync as gs
from gradsync.autotune.profiling import Timing, join, pack, spread, unpack
from gradsync.autotune.stopwatch import HostClock, StepSample, Stopwatch, clock_for
from gradsync.engine.bucket import GradEntry
from models import Branches, Tied, mlp


class Ticking:
    """A clock that is one second further each time somebody looks."""

    def __init__(self) -> None:
        self._ticks = itertools.count()
        self.queued = 0.0

    def now(self) -> float:
        return float(next(self._ticks))

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def queued_s(self) -> float:
        return self.queued


def names(profile: gs.ModelProfile) -> list[str]:
    return [gradient.name for gradient in profile.gradients]


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
    def step() -> None:
        model(torch.ones(6, 8)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def test_gradients_stand_in_the_order_of_backward() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = gs.profile(model, stepping(model, optimizer), optimizer)
    assert [name.split(".")[0] for name in names(profile)] == ["4", "4", "2", "2", "0", "0"]
    assert profile.gradients[-1].ready_s <= profile.backward_s
    assert min(profile.forward_s, profile.backward_s, profile.optimizer_s) > 0
    assert profile.nbytes == sum(param.numel() * 4 for param in model.parameters())
    assert profile.jitter is not None
    assert profile.source == "measured"


def test_the_first_step_is_left_out_and_hooks_are_gone_afterwards() -> None:
    model, calls = mlp(), []

    def step() -> None:
        calls.append(len(calls))
        stepping(model)()

    gs.profile(model, step, steps=3)
    assert len(calls) == 4
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    gs.profile(model, step, steps=1)  # it is not taken for attached


def test_hooks_are_gone_after_a_step_that_raised() -> None:
    model = mlp()

    def step() -> None:
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        gs.profile(model, step)
    assert not model._forward_hooks
    gs.profile(model, stepping(model), steps=1)


def test_a_tied_weight_is_one_gradient_and_a_frozen_one_is_none() -> None:
    tied = Tied()
    assert names(gs.profile(tied, stepping(tied))) == ["embed.weight"]
    model = mlp()
    model[0].requires_grad_(False)
    assert {name.split(".")[0] for name in names(gs.profile(model, stepping(model)))} == {"2", "4"}


def test_an_unused_parameter_travels_last() -> None:
    model = Branches()
    profile = gs.profile(model, lambda: model(torch.ones(2, 8), 1).sum().backward())
    unused = {name: gradient.ready_s for name, gradient in zip(names(profile), profile.gradients, strict=True)}
    assert unused["branches.0.weight"] == unused["branches.2.bias"] == profile.backward_s
    assert len(unused) == 8


def test_a_sparse_gradient_is_not_in_it() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    profile = gs.profile(model, lambda: model(torch.arange(3)).sum().backward())
    assert set(names(profile)) == {"1.weight", "1.bias"}


def several_backwards(model: nn.Module) -> None:
    for _ in range(3):
        stepping(model)()


def parts_one_by_one(model: nn.Module) -> None:
    x = torch.ones(6, 8)
    for part in model.children():
        x = part(x)
    x.sum().backward()


def inner_gradient(model: nn.Module) -> None:
    x = torch.ones(6, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).sum() + grad.square().sum()).backward()


def checkpointed(model: nn.Module) -> None:
    x = torch.ones(6, 8, requires_grad=True)
    torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=True).sum().backward()


@pytest.mark.parametrize("step", [several_backwards, parts_one_by_one, inner_gradient, checkpointed])
def test_every_way_of_a_step_has_every_gradient_once(step: Callable[[nn.Module], None]) -> None:
    model = mlp()
    profile = gs.profile(model, lambda: step(model), steps=2)
    assert sorted(names(profile)) == sorted(name for name, _ in model.named_parameters())
    assert profile.backward_s > 0


def test_an_optimizer_with_a_closure_is_no_time_of_its_own() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = model(torch.ones(6, 8)).square().mean()
        found.backward()
        return found

    profile = gs.profile(model, lambda: optimizer.step(loss), optimizer, steps=1)
    assert profile.optimizer_s == 0
    assert profile.forward_s > 0


def bad_calls() -> Iterator[tuple[Callable[[], object], str]]:
    model = mlp()
    yield lambda: gs.profile(model, lambda: None), "no gradient of Sequential arrived in 6 calls of step"
    yield lambda: gs.profile(model, lambda: model(torch.ones(1, 8))), "no gradient of Sequential arrived"
    yield lambda: gs.profile(model, stepping(model), steps=0), "steps must be a whole number of at least 1, got 0"
    yield lambda: gs.profile(model, 3), "step must be a function"
    yield lambda: gs.profile(model, stepping(model), torch.optim.SGD(mlp().parameters())), "SGD holds a parameter"
    yield lambda: gs.profile(nn.Tanh(), lambda: None), "no parameter that requires a gradient"
    yield lambda: gs.profile(3, lambda: None), "takes a torch.nn.Module, got int"


@pytest.mark.parametrize("case", range(7))
def test_bad_arguments_are_one_sentence(case: int) -> None:
    call, sentence = list(bad_calls())[case]
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


def test_it_works_beside_a_process_group(run: Callable[..., list[object]]) -> None:
    run(check_beside_a_group)


def check_beside_a_group() -> None:
    model = mlp()
    gs.profile(model, stepping(model), steps=1)
    sync = gs.attach(model)
    with pytest.raises(ValueError, match="is attached already"):
        gs.profile(model, stepping(model), steps=1)
    sync.detach()


# The stopwatch


def test_the_parts_of_a_step_add_up_to_the_whole() -> None:
    watch = Stopwatch(Ticking())  # looks at 0
    watch.optimizer_begins()
    watch.optimizer_ends()  # from 1 to 2
    watch.forward_begins()  # 3
    watch.backward_begins()  # 4
    watch.arrived(1)  # 5
    watch.arrived(0)  # 6
    watch.backward_ends()  # 7
    watch.lap(counts=True, waited=True)  # 8
    (sample,) = watch.samples()
    assert sample == StepSample(1, 3, 1, 2, 1, {1: 1, 0: 2})
    assert sample.compute_s + sample.waited_s == 8


def test_waiting_for_a_core_is_no_part_of_the_work() -> None:
    clock = Ticking()
    watch = Stopwatch(clock)
    watch.forward_begins()
    watch.backward_begins()
    watch.arrived(0)
    clock.queued += 1.5  # of the 3 seconds of backward
    watch.arrived(1)
    watch.backward_ends()
    watch.lap(counts=True, waited=False)
    (sample,) = watch.samples()
    assert (sample.forward_s, sample.backward_s) == (1.0, 1.5)
    assert sample.ready_s == {0: 0.5, 1: 1.0}  # spread over backward


def test_of_several_backwards_the_last_counts_and_the_others_are_forward() -> None:
    watch = Stopwatch(Ticking())
    for index in (0, 1):
        watch.forward_begins()  # 1, 5
        watch.backward_begins()  # 2, 6
        watch.arrived(index)  # 3, 7
        watch.backward_ends()  # 4, 8
    watch.lap(counts=True, waited=False)  # 9
    assert watch.samples() == [StepSample(4, 2, 0, 3, 0, {0: 0, 1: 1})]


def test_a_lap_that_does_not_count_leaves_nothing() -> None:
    watch = Stopwatch(Ticking())
    watch.forward_begins()
    watch.backward_begins()
    watch.backward_ends()
    watch.lap(counts=False, waited=True)
    watch.lap(counts=True, waited=True)  # nothing happened in it
    assert watch.samples() == []


def test_only_one_gpu_has_a_clock_of_its_own() -> None:
    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert all(isinstance(clock_for(devices), HostClock) for devices in ([cpu], [first, second], [cpu, first], []))
    assert not isinstance(clock_for([first, first]), HostClock)


# The ranks' times as one profile


def entries(count: int) -> list[GradEntry]:
    return [GradEntry(i, f"p{i}", nn.Parameter(torch.zeros(2)), {}, f"p{i}", False) for i in range(count)]


def test_times_are_medians_over_the_ranks() -> None:
    ranks = [Timing(f, 1.0, 0.1, 0.0, 0.2, [f + 1.1] * 3, [0.5, f / 10]) for f in (1.0, 2.0, 9.0)]
    profile = join(ranks, entries(2), "net")
    assert (profile.forward_s, profile.backward_s, profile.name) == (2.0, 1.0, "net")
    assert [(g.name, g.ready_s) for g in profile.gradients] == [("p1", 0.2), ("p0", 0.5)]
    assert profile.jitter == pytest.approx(1.4826 * 1.0 / 3.1)


def test_a_gradient_that_some_ranks_never_saw_is_theirs_who_did() -> None:
    ranks = [
        Timing(1.0, 1.0, 0.0, 0.0, 0.0, [2.0], [math.nan, math.nan]),
        Timing(1, 1, 0, 0, 0, [2.0], [0.3, math.nan]),
    ]
    profile = join(ranks, entries(2), "net")
    assert [(g.name, g.ready_s) for g in profile.gradients] == [("p0", 0.3), ("p1", 1.0)]
    assert profile.jitter is None  # two steps in all: too few


def test_rows_are_equally_long_whatever_was_measured() -> None:
    timing = Timing(1.0, 2.0, 3.0, 4.0, 5.0, [6.0, 7.0], [8.0, 9.0, 10.0])
    rows = [pack(timing, 5, 3), pack(timing._replace(compute_s=[]), 5, 3), pack(None, 5, 3)]
    assert len({len(row) for row in rows}) == 1
    assert unpack(rows[0], 5) == timing


def test_one_straggler_is_no_jitter() -> None:
    assert spread([1.0] * 9 + [50.0]) == 0.0
