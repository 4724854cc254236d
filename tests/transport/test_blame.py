"""Blame: to who is dead, silent or late, never to who reported."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsync.transport.blame import Sight, Sights, account, blame, is_lost, late, lost, stopped
from gradsync.transport.heartbeat import Phase, RankState

STEP = 5


def sight(phase: Phase = Phase.WAITING, step: int = STEP, dead: bool = False, silent: bool = False, culprits=()):
    return Sight(RankState(0, step, phase, -1, tuple(culprits)), dead, silent)


WAITING = sight()


def blamed(sights: Sights, suspects: list[int]) -> list[int]:
    guilty, excused = blame(sights, suspects, STEP)
    return guilty or excused


def test_who_died_or_fell_silent_in_this_step_is_lost_at_once() -> None:
    sights = {0: sight(Phase.BACKWARD, dead=True), 1: WAITING, 2: sight(Phase.COMPUTING, STEP - 1, silent=True)}
    assert lost(sights, STEP) == [0, 2]


def test_who_gave_up_left_or_finished_the_step_is_not_lost_at_once() -> None:
    sights = {
        0: sight(Phase.FAILED, dead=True),
        1: sight(Phase.LEFT, dead=True),
        2: sight(Phase.COMPUTING, STEP + 1, dead=True),
    }
    assert lost(sights, STEP) == []
    assert stopped(sights) == [0, 1, 2]
    assert blamed(sights, stopped(sights)) == [0, 1, 2]


def test_who_reported_and_exited_is_not_blamed() -> None:
    sights = {0: sight(Phase.LOST_PEER, dead=True, culprits=[2]), 2: sight(Phase.BACKWARD, dead=True), 3: WAITING}
    assert blamed(sights, stopped(sights)) == [2]


def test_reports_are_followed_to_their_end() -> None:
    sights = {
        0: sight(Phase.FAILED, culprits=[1]),
        1: sight(Phase.LOST_PEER, culprits=[3]),
        3: sight(Phase.COMPUTING, silent=True),
    }
    assert blamed(sights, [0]) == [3]


def test_who_failed_without_a_culprit_is_blamed_only_if_nobody_else_is() -> None:
    failed = sight(Phase.FAILED, dead=True)
    assert blamed({0: failed, 2: sight(Phase.BACKWARD, dead=True)}, [0, 2]) == [2]
    assert blamed({0: failed, 2: WAITING}, [0]) == [0]


def test_this_rank_may_be_the_one() -> None:
    assert blamed({0: sight(Phase.FAILED, culprits=[1]), 2: sight(Phase.FAILED, culprits=[1])}, [0, 2]) == [1]


def test_who_waits_in_this_step_or_is_past_it_is_not_late() -> None:
    sights = {0: WAITING, 1: sight(Phase.BACKWARD), 2: sight(Phase.COMPUTING, STEP + 1), 3: sight(step=STEP - 1)}
    assert late(sights, STEP) == [1, 3]


def test_a_rank_that_another_found_silent_is_lost_not_late() -> None:
    computing = sight(Phase.COMPUTING)
    assert is_lost({0: sight(Phase.LOST_PEER, culprits=[2]), 2: computing}, 2)
    assert not is_lost({0: sight(Phase.FAILED, culprits=[2]), 2: computing}, 2)


STATES = st.builds(
    RankState,
    st.integers(0, 9),
    st.integers(STEP - 1, STEP + 1),
    st.sampled_from(Phase),
    st.just(-1),
    st.lists(st.integers(-1, 9), max_size=3).map(tuple),  # also ranks that do not exist
)
SIGHTS = st.lists(st.builds(Sight, STATES, st.booleans(), st.booleans()), min_size=1, max_size=4).map(
    lambda seen: dict(enumerate(seen))
)


@given(SIGHTS)
def test_blame_ends_and_falls_on_members_who_name_no_other(sights: Sights) -> None:
    guilty, excused = blame(sights, stopped(sights), STEP)
    assert not set(guilty) & set(excused)
    for rank in guilty + excused:
        assert 0 <= rank <= len(sights)
        if rank in sights:
            state = sights[rank].state
            assert state.phase not in (Phase.FAILED, Phase.LOST_PEER) or not state.culprits
            assert f"step {state.step}" in account(sights[rank], "rank 1", None, is_lost(sights, rank))
