"""What else may happen while `gs.auto()` measures and switches: a story each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from autos import BUCKETS, Training, choosing, cluster, off, overhearing
from gradsync.plan.auto import PROFILING
from models import mlp

Run = Callable[..., list[Any]]
INT8 = gs.Plan(compress=gs.int8())


def quick(steps: int = 2, **arguments: Any) -> Any:
    return gs.auto(cluster=cluster(), steps=steps, **arguments)


def as_with_the_default(story: Callable[[Any], list[str]]) -> list[str]:
    """The story under auto, which must end as it does with the default plan."""
    theirs = story(gs.Plan())
    with choosing(BUCKETS), overhearing():
        ours = story(quick())
    assert ours == theirs
    return ours


# Ways to synchronize


def tell_of_micro_batches(plan: Any) -> list[str]:
    run, digests = Training(plan), []
    for step in range(8):
        with run.sync.no_sync():
            (run.loss(2 * step) / 2).backward()
        (run.loss(2 * step + 1) / 2).backward()
        run.apply()
        digests.append(run.digest())
    _finish(run, plan)
    return digests


def tell_of_weights(plan: Any) -> list[str]:
    run, digests = Training(plan), []
    for step in range(8):
        run.sync.set_batch_weight(1 + dist.get_rank() * step)  # before the border that comes with forward
        run.loss(step).backward()
        run.apply()
        digests.append(run.digest())
    _finish(run, plan)
    return digests


def tell_of_standing_gradients(plan: Any) -> list[str]:
    """Never set to None: each average is added to what stands there, also when its bucket has gone."""
    run, digests = Training(plan), []
    for step in range(8):
        run.loss(step).backward()
        digests.append(str([param.grad.double().sum().item() for param in run.model.parameters()]))
    _finish(run, plan)
    return digests


def tell_of_parts(plan: Any) -> list[str]:
    """The model itself is never called, so the switch comes with the first gradient."""
    run, digests = Training(plan), []
    for step in range(8):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
        for part in run.model:
            x = part(x)
        x.square().mean().backward()
        run.apply()
        digests.append(run.digest())
    _finish(run, plan)
    return digests


def tell_of_an_early_forward(plan: Any) -> list[str]:
    """Each forward runs before the backward of the one before it."""
    run, digests = Training(plan), []
    waiting = run.loss(0)
    for step in range(1, 9):
        after = run.loss(step)
        waiting.backward()
        waiting = after
        digests.append(str([param.grad.double().sum().item() for param in run.model.parameters()]))
        run.optimizer.zero_grad()
    _finish(run, plan)
    return digests


def tell_of_untouched_parameters(plan: Any) -> list[str]:
    """One rank's loss touches no parameter at all, just when it is time to switch."""
    run, digests = Training(plan), []
    for step in range(8):
        if not (dist.get_rank() == 1 and step in (2, 3)):
            run.loss(step).backward()
        run.apply()
        digests.append(run.digest())
    _finish(run, plan)
    return digests


def tell_of_freezing(plan: Any) -> list[str]:
    run, digests = Training(plan), []
    for step in range(8):
        if step in (3, 6):
            run.model[2].requires_grad_(step == 6)
        digests += run.train(range(step, step + 1))
    _finish(run, plan)
    return digests


def tell_of_two_models(plan: Any) -> list[str]:
    """Two share every backward, and both switch."""
    first, second, digests = Training(plan), Training(plan), []
    for step in range(8):
        (first.loss(step) + second.loss(step + 50)).backward()
        first.apply()
        second.apply()
        digests.append(first.digest() + second.digest())
    for run in (first, second):
        _finish(run, plan)
    return digests


def _finish(run: Training, plan: Any) -> None:
    assert run.sync.plan == (plan if isinstance(plan, gs.Plan) else BUCKETS)
    run.sync.detach()


@pytest.mark.parametrize(
    "story",
    [
        tell_of_micro_batches,
        tell_of_weights,
        tell_of_standing_gradients,
        tell_of_parts,
        tell_of_an_early_forward,
        tell_of_untouched_parameters,
        tell_of_freezing,
        tell_of_two_models,
    ],
)
def test_whatever_a_loop_does_it_trains_as_with_the_default_plan(story: Callable[[Any], list[str]], run: Run) -> None:
    one, two = run(as_with_the_default, story)
    assert one == two


def check_buffers() -> str:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    with choosing(BUCKETS), overhearing():
        run = Training(quick(), build)
        run.train(range(6))
        run.sync.detach()
    return str([buffer.tolist() for buffer in run.model.buffers()])


def test_buffers_travel_on(run: Run) -> None:
    one, two = run(check_buffers)
    assert one == two


def check_uneven(batches: tuple[int, int]) -> tuple[str, bool]:
    with choosing(BUCKETS), overhearing():
        run = Training(quick())
        with run.sync.join():
            run.train(range(batches[dist.get_rank()]))
        switched = run.sync.plan == BUCKETS
        run.sync.detach()
    return run.digest(), switched


@pytest.mark.parametrize("batches", [(8, 2), (1, 8), (3, 4), (3, 3)])
def test_a_rank_that_is_out_of_data_switches_too(batches: tuple[int, int], run: Run) -> None:
    one, two = run(check_uneven, batches)
    assert one == two
    assert one[1]


# What goes wrong in a step


def check_aborted(when: int) -> str:
    with choosing(BUCKETS), overhearing():
        run = Training(quick())
        for step in range(8):
            loss = run.loss(step)
            if step == when and dist.get_rank() == 1:
                handle = run.model[0].weight.register_hook(_raise)
                with pytest.raises(KeyError):
                    loss.backward()
                handle.remove()
            else:
                loss.backward()
                run.apply()
        assert run.sync.plan == BUCKETS
        run.sync.detach()
    return run.digest()


def _raise(grad: torch.Tensor) -> None:
    raise KeyError("in backward")


@pytest.mark.parametrize("when", [1, 2])
def test_a_backward_that_raises_while_profiling_is_only_not_counted(when: int, run: Run) -> None:
    one, two = run(check_aborted, when)
    assert one == two


def check_dropped() -> list[gs.Plan]:
    with choosing(BUCKETS) as profiles, overhearing():
        run = Training(quick(steps=1), guard=gs.Guard(nonfinite="skip"))
        for step in range(6):
            (run.loss(step) * (math.nan if step < 3 else 1)).backward()
            run.plans.append(run.sync.plan)
            run.apply()
        assert len(profiles) == (dist.get_rank() == 0)
        run.sync.detach()
    return run.plans


def test_if_every_step_was_dropped_it_profiles_again(run: Run) -> None:
    assert run(check_dropped) == [[PROFILING] * 4 + [BUCKETS] * 2] * 2


def check_detached(steps: int) -> None:
    with choosing(BUCKETS), overhearing():
        run = Training(quick())
        run.train(range(steps))
        run.sync.detach()
        run.train(range(2))  # each on its own from here


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_it_can_be_taken_off_at_any_time(steps: int, run: Run) -> None:
    run(check_detached, steps)


def check_parting() -> None:
    with choosing(BUCKETS), overhearing():
        run = Training(quick())
        run.train(range(3))
        # Rank 1 says goodbye where the other one wants to choose.
        part: Callable[[], object] = run.sync.detach if dist.get_rank() else partial(run.loss, 3)
        with pytest.raises(gs.Disagreement, match=r"the choice of a plan by gs.auto\(\)"):
            part()
        run.sync.detach()


def test_ranks_that_part_at_the_border_are_told(run: Run) -> None:
    run(check_parting)


# Checkpoints


def check_resumed(plan: gs.Plan, cut: int) -> tuple[bool, str]:
    with choosing(plan), overhearing():
        whole = Training(quick(allow="lossy"))
        first = Training(quick(allow="lossy"))
        whole.train(range(10))
        first.train(range(cut))
        saved = first.sync.state_dict()
        second = Training(quick(allow="lossy"))
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.sync.load_state_dict(saved)
        at_once = second.sync.plan == plan
        if at_once:
            assert second.sync.stats()["predicted_step_s"] == first.sync.stats()["predicted_step_s"]
        second.train(range(cut, 10))
        if at_once or plan.compress is None:
            assert second.digest() == whole.digest()
        for each in (whole, first, second):
            each.sync.detach()
    return at_once, second.digest()


@pytest.mark.parametrize(("plan", "cut"), [(BUCKETS, 6), (INT8, 6), (BUCKETS, 2)])
def test_a_resumed_run_goes_on_with_the_plan_it_had(plan: gs.Plan, cut: int, run: Run) -> None:
    one, two = run(check_resumed, plan, cut)
    assert one == two
    assert one[0] == (cut == 6)  # before the choice there is none to go on with: it is made again


def check_one_file() -> None:
    with choosing(INT8), overhearing():
        run = Training(quick(allow="lossy"))
        run.train(range(4))
        state = run.sync.state_dict(all_ranks=True)
        assert bool(state) == (dist.get_rank() == 0)
        other = Training(quick(allow="lossy"))
        other.sync.load_state_dict(state)  # rank 0 alone has something
        assert other.sync.plan == INT8
        careful = Training(quick(allow="exact"))
        careful.sync.load_state_dict(run.sync.state_dict())
        assert careful.sync.plan == PROFILING  # that plan is not allowed here
        for each in (run, other, careful):
            each.sync.detach()


def test_rank_0_may_bring_the_plan_and_a_forbidden_one_is_not_taken(run: Run) -> None:
    run(_quietly, check_one_file)


def check_strange_state() -> None:
    with choosing(BUCKETS), overhearing():
        run = Training(quick())
        run.train(range(4))
        state = run.sync.state_dict()
        if dist.get_rank() == 1:
            state["gradsync.auto"] = torch.full((1024,), ord("x"), dtype=torch.uint8)
        kind, sentence = (
            (ValueError, "is not what gs.auto")
            if dist.get_rank()
            else (gs.Disagreement, "rank 1 cannot load its state")
        )
        with pytest.raises(kind, match=sentence):
            run.sync.load_state_dict(state)
        run.train(range(4, 6))
        run.sync.detach()


def test_a_strange_state_is_refused_by_all_and_nothing_has_changed(run: Run) -> None:
    run(check_strange_state)


def check_other_runs() -> None:
    """States go between runs with and without auto."""
    with choosing(BUCKETS), overhearing():
        fixed, chosen = Training(gs.Plan()), Training(quick())
        fixed.train(range(6))
        chosen.sync.load_state_dict(fixed.sync.state_dict())
        chosen.train(range(4))
        assert chosen.plans == [PROFILING] * 3 + [BUCKETS]
        fixed.sync.load_state_dict(chosen.sync.state_dict())
        assert fixed.sync.plan == gs.Plan()
        for each in (fixed, chosen):
            each.sync.detach()


def test_states_go_between_runs_with_and_without_auto(run: Run) -> None:
    run(check_other_runs)


def check_residuals() -> None:
    """What int8 had not sent yet waits while the steps are profiled again, and is sent after."""
    with choosing(INT8), off(True), overhearing():
        run = Training(quick(steps=1, allow="lossy", recheck_every=3))
        run.train(range(5))
        before = run.sync.residuals()
        run.train(range(5, 6))
        assert run.sync.plan == PROFILING
        during = run.sync.residuals()
        assert before.keys() == during.keys() == {name for name, _ in run.model.named_parameters()}
        assert all(torch.equal(before[name], during[name]) for name in before)
        run.train(range(6, 8))
        assert run.sync.plan == INT8
        assert not torch.equal(run.sync.residuals()["0.weight"], before["0.weight"])
        run.sync.detach()


def test_residuals_outlive_the_profiling(run: Run) -> None:
    run(check_residuals)


def _quietly(check: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()


def check_no_optimizer() -> None:
    torch.manual_seed(0)
    model = mlp()
    with choosing(BUCKETS) as profiles, overhearing():
        sync = gs.attach(model, plan=quick())
        for step in range(6):
            model(torch.randn(6, 8) + step).sum().backward()
        assert sync.plan == BUCKETS
        assert all(profile.optimizer_s == 0 for profile in profiles)
        sync.detach()


def test_it_needs_no_optimizer(run: Run) -> None:
    run(check_no_optimizer)
