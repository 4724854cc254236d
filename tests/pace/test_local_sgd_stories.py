"""Local SGD through odd steps, drains and checkpoints: the ranks stay in step, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lines import GRADIENTS, Run, check_continuation, heard, raised

import gradsync as gs
from models import Raises

Ranks = Callable[..., list[Any]]


# Odd steps


def check_skipped_step() -> None:
    run = Run(gs.Plan(pace=gs.local_sgd(2)))
    run.step()  # 0 and −2
    run.step(steps=run.rank == 0)  # as a GradScaler does: rank 0 is at −1, rank 1 still at −2
    assert run.sync.replicas_equal != (run.rank == 1)
    assert run.step()[0] == -1.5 - GRADIENTS[run.rank][0]  # before its forward rank 1 did what was due
    run.step()
    assert run.values[0] == -1.5 - 4
    run.sync.detach()


def test_a_step_that_one_rank_skips_keeps_no_rank_waiting(run: Ranks) -> None:
    run(check_skipped_step)


def check_aborted() -> None:
    run = Run(gs.Plan(pace=gs.local_sgd(2)))
    run.step()  # 0 and −2
    if run.rank == 1:
        bad = Raises.apply(run.model.a)
        with pytest.raises(ArithmeticError, match="a user's own exception"):
            (run.model(torch.ones(1), torch.ones(1)) + bad.sum() * 0).backward()
        run.optimizer.step()  # applies nothing
    else:
        run.step()  # −1
    run.model(torch.zeros(1), torch.zeros(1))
    assert run.values[0] == -1.5
    assert run.step()[0] == -1.5 - GRADIENTS[run.rank][0]
    run.sync.detach()


def test_a_backward_that_raises_counts_and_applies_nothing(run: Ranks) -> None:
    run(check_aborted)


def check_several_backwards() -> None:
    run = Run(gs.Plan(pace=gs.local_sgd(1)))
    with run.sync.no_sync():
        run.model(torch.ones(1), torch.ones(1)).backward()
    assert run.step()[0] == 1 - 1 - 2
    losses = [run.model(torch.ones(1), torch.ones(1)) for _ in range(2)]
    losses[0].backward()
    text = raised(losses[1].backward)
    assert "a backward begins" in text
    assert "sync.no_sync()" in text
    run.sync.detach()


def test_of_several_backwards_in_a_step_the_last_one_counts(run: Ranks) -> None:
    run(check_several_backwards)


def check_nan() -> None:
    run = Run(gs.Plan(pace=gs.local_sgd(2)), guard=gs.Guard(nonfinite="raise"))
    run.step()
    text = raised(lambda: run.step(float("nan") if run.rank else 1.0))
    assert text.startswith("NonFinite")
    assert "rank 1 brought NaN or Inf in a" in text
    assert run.rank or run.values == [-1, -3]
    run.sync.detach()


def test_a_nan_is_named_and_reaches_no_other_rank(run: Ranks) -> None:
    run(check_nan)


# Ends and beginnings


def check_drain_and_broadcast(compress: Any) -> None:
    run = Run(gs.Plan(pace=gs.local_sgd(3), compress=compress))
    run.step()
    assert run.drain() == [-1, -2]
    assert run.sync.replicas_equal
    run.steps(2)  # the clock goes on: this was step 3
    assert run.values == [-5, -8]
    with torch.no_grad():
        run.model.a.fill_(10 + run.rank)
    run.sync.broadcast(1)
    run.steps(3)
    assert run.values == [11 - 6, -8 - 9]
    run.sync.detach()


@pytest.mark.parametrize("compress", [None, gs.bf16()], ids=["exact", "compressed"])
def test_drain_averages_now_and_broadcast_begins_anew(compress: Any, run: Ranks) -> None:
    run(check_drain_and_broadcast, compress)


def check_unequal_drain() -> str:
    run = Run(gs.Plan(pace=gs.local_sgd(4)), guard=gs.Guard(timeout=20.0))

    def train() -> None:
        for t in range(8):
            if t == 3 and run.rank == 0:
                run.drain()
            run.step()

    text = raised(train)
    run.sync.detach()
    return text


def test_ranks_that_drain_unequally_say_so(run: Ranks) -> None:
    for text in run(check_unequal_drain):
        assert text.startswith("Disagreement")
        assert "rank 1 has run 4 backward calls and rank 0 3 in exchange 0" in text


# Saving


@pytest.mark.parametrize(
    ("pace", "compress"),
    [(gs.local_sgd(3, warmup=2, optimizer_state=True), None), (gs.local_sgd(3), gs.int4(block=32))],
    ids=["exact", "compressed"],
)
def test_continuing_is_the_uninterrupted_run(pace: Any, compress: Any, run: Ranks) -> None:
    run(check_continuation, gs.Plan(pace=pace, compress=compress), (0, 1, 3, 4), 8)


def check_other_states() -> None:
    exact, packed = Run(gs.Plan(pace=gs.local_sgd(4))), Run(gs.Plan(pace=gs.local_sgd(4), compress=gs.bf16()))
    outer = Run(gs.Plan(pace=gs.diloco(4)))
    exact.steps(3)  # −2 and −8
    outer.steps(3)
    packed.model.load_state_dict(exact.model.state_dict())
    packed.sync.load_state_dict(exact.sync.state_dict())  # there is no last mean to begin from: it is made now
    assert packed.values == [-5, -8]
    assert packed.steps(1)[0] == [-7, -11]  # step 4
    exact.model.load_state_dict(outer.model.state_dict())
    said = heard(lambda: exact.sync.load_state_dict(outer.sync.state_dict()))
    assert len(said) == (exact.rank == 0)
    assert not said or "this plan's is local_sgd" in said[0]
    assert exact.values == [-5, -8]
    for each in (exact, packed, outer):
        each.sync.detach()


def test_a_state_without_a_last_mean_begins_from_one(run: Ranks) -> None:
    run(check_other_states)
