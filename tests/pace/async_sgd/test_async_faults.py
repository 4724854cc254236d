"""Death, lateness, NaN and misuse: every wait ends, and every error names somebody and a way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import async_faults
import pytest
import torch

from gradsync.launch.spawn import RankPool
from gradsync.plan.paces import AsyncSGD
from gradsync.transport.heartbeat import Phase
from in_a_tree import in_a_tree

Run = Callable[..., list[Any]]


def test_a_rank_that_lives_but_does_not_come_is_named(run: Run) -> None:
    (kind, ranks, text), (other_kind, other_ranks, other_text) = run(async_faults.stay_away, AsyncSGD(0))
    assert (kind, ranks) == ("SyncTimeout", [1])
    assert "rank 1 (pid" in text
    assert "sync.drain() when it has no more data" in text
    assert (other_kind, other_ranks) == ("SyncTimeout", [1])
    assert "the others gave up waiting for this rank" in other_text


def test_an_optimizer_that_fails_in_the_receiver_thread_is_an_error_here_and_elsewhere(run: Run) -> None:
    (kind, ranks, text), (own_kind, _, own_text) = run(async_faults.fail_to_step)
    assert (kind, ranks) == ("PeerLost", [1])
    assert "rank 1 (pid" in text
    assert "failed" in text
    assert own_kind == "GradSyncError"
    assert "ValueError: not for others" in own_text


@pytest.mark.parametrize("s", [0, 2])
def test_a_nan_reaches_the_parameters_of_all(run: Run, s: int) -> None:
    for weights in run(async_faults.meet_nan, AsyncSGD(s)):
        assert torch.isnan(weights[-1]).all()


def test_who_does_not_use_a_parameter_gives_nothing_for_it(run: Run) -> None:
    """Of 4 ranks one holds no parameter; used: 1 − 1 − 1/4, partly: 1 − 1/4 − 1/4, unused: not even decayed."""
    for used, partly, unused in run(async_faults.use_parameters_on_some_ranks, ranks=4):
        assert (used.item(), partly.item(), unused.item()) == (-0.25, 0.5, 1.0)


def test_a_call_at_the_wrong_time_says_what_to_do(run: Run) -> None:
    for twice, state, load, left in run(async_faults.misuse):
        assert "run a forward between two backward passes" in twice
        assert "call sync.drain() on all ranks first" in state
        assert "call sync.drain() on all ranks first" in load
        assert "this rank pushed after it had left" in left


def test_the_threads_end_with_the_last_reference(run: Run) -> None:
    assert run(async_faults.forget) == [set(), set()]


def test_the_threads_end_with_who_gives_up(run: Run) -> None:
    assert run(async_faults.give_up) == [set(), set()]


def test_keep_alives_bridge_a_silence_longer_than_the_groups_timeout(run: Run) -> None:
    assert run(async_faults.keep_silent) == [7, 7]


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abc"])
def test_a_dead_rank_is_named_with_a_parameter_of_its_shard(hosts: str, pool: RankPool) -> None:
    outcomes = pool.outcomes(in_a_tree, async_faults.lose, hosts, 1, 3, AsyncSGD(1), ranks=3)
    assert "SIGKILL" in outcomes[1].text
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].text
        kind, ranks, text, told = outcomes[rank].value
        assert (told.phase, told.culprits) == (Phase.LOST_PEER, (1,)), "the others need not find out by themselves"
        assert (kind, ranks) == ("PeerLost", [1]), text
        assert text.startswith(f"[rank {rank}/3 step 0] rank 1 ")
        assert re.search(
            r"rank 1 kept the shard of '[02]\.(weight|bias)'( and \d more)?, which no other rank holds", text
        )


def test_who_leaves_beside_a_dead_rank_hears_of_it(pool: RankPool) -> None:
    outcomes = pool.outcomes(async_faults.leave_beside_a_dead_rank, 1, ranks=3)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].text
        kind, ranks, text = outcomes[rank].value
        assert (kind, ranks) == ("PeerLost", [1]), text
        assert "while this rank was in leave()" in text
