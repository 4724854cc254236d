"""Blame: to who is dead, silent or late, never to who reported."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsync.transport.blame import PeerView, PeerViews, blame, describe_peer, is_lost, late, lost, stopped, unheard
from gradsync.transport.heartbeat import Phase, RankState

STEP = 5


def view(phase: Phase = Phase.WAITING, step: int = STEP, dead: bool = False, silent: bool = False, culprits=()):
    return PeerView(RankState(0, step, phase, -1, tuple(culprits)), dead, silent)


WAITING = view()


def blamed(views: PeerViews, suspects: list[int]) -> list[int]:
    guilty, excused = blame(views, suspects, STEP)
    return guilty or excused


def test_who_died_or_fell_silent_in_this_step_is_lost_at_once() -> None:
    views = {0: view(Phase.BACKWARD, dead=True), 1: WAITING, 2: view(Phase.COMPUTING, STEP - 1, silent=True)}
    assert lost(views, STEP) == [0, 2]


def test_who_gave_up_left_or_finished_the_step_is_not_lost_at_once() -> None:
    views = {
        0: view(Phase.FAILED, dead=True),
        1: view(Phase.LEFT, dead=True),
        2: view(Phase.COMPUTING, STEP + 1, dead=True),
    }
    assert lost(views, STEP) == []
    assert stopped(views) == [0, 1, 2]
    assert blamed(views, stopped(views)) == [0, 1, 2]


def test_who_reported_and_exited_is_not_blamed() -> None:
    views = {0: view(Phase.LOST_PEER, dead=True, culprits=[2]), 2: view(Phase.BACKWARD, dead=True), 3: WAITING}
    assert blamed(views, stopped(views)) == [2]


def test_reports_are_followed_to_their_end() -> None:
    views = {
        0: view(Phase.FAILED, culprits=[1]),
        1: view(Phase.LOST_PEER, culprits=[3]),
        3: view(Phase.COMPUTING, silent=True),
    }
    assert blamed(views, [0]) == [3]


def test_who_failed_without_a_culprit_is_blamed_only_if_nobody_else_is() -> None:
    failed = view(Phase.FAILED, dead=True)
    assert blamed({0: failed, 2: view(Phase.BACKWARD, dead=True)}, [0, 2]) == [2]
    assert blamed({0: failed, 2: WAITING}, [0]) == [0]


def test_this_rank_may_be_the_one() -> None:
    assert blamed({0: view(Phase.FAILED, culprits=[1]), 2: view(Phase.FAILED, culprits=[1])}, [0, 2]) == [1]


def test_who_waits_in_this_step_or_is_past_it_is_not_late() -> None:
    views = {0: WAITING, 1: view(Phase.BACKWARD), 2: view(Phase.COMPUTING, STEP + 1), 3: view(step=STEP - 1)}
    assert late(views, STEP) == [1, 3]


def test_a_rank_that_another_found_silent_is_lost_not_late() -> None:
    computing = view(Phase.COMPUTING)
    assert is_lost({0: view(Phase.LOST_PEER, culprits=[2]), 2: computing}, 2)
    assert not is_lost({0: view(Phase.FAILED, culprits=[2]), 2: computing}, 2)


STATES = st.builds(
    RankState,
    st.integers(0, 9),
    st.integers(STEP - 1, STEP + 1),
    st.sampled_from(Phase),
    st.just(-1),
    st.lists(st.integers(-1, 9), max_size=3).map(tuple),  # also ranks that do not exist
)
SIGHTS = st.lists(st.builds(PeerView, STATES, st.booleans(), st.booleans()), min_size=1, max_size=4).map(
    lambda seen: dict(enumerate(seen))
)


@given(SIGHTS)
def test_blame_ends_and_falls_on_members_who_name_no_other(views: PeerViews) -> None:
    guilty, excused = blame(views, stopped(views), STEP)
    assert not set(guilty) & set(excused)
    for rank in guilty + excused:
        assert 0 <= rank <= len(views)
        if rank in views:
            state = views[rank].state
            assert state.phase not in (Phase.FAILED, Phase.LOST_PEER) or not state.culprits
            assert f"step {state.step}" in describe_peer(views[rank], "rank 1", None, is_lost(views, rank))


def test_who_was_given_up_is_blamed_though_nothing_more_is_known_of_it() -> None:
    """In a large group there are views of some ranks only."""
    views = {0: view(Phase.LOST_PEER, culprits=[700])}
    assert blame(views, [0], STEP, size=1024) == ([700], [])
    assert blame(views, [0], STEP, size=512) == ([], [])  # there is no such rank
    assert is_lost(views, 700)


def test_of_whom_nothing_is_heard_is_neither_late_nor_lost() -> None:
    unsure = view(Phase.BACKWARD)._replace(unheard_s=12.0)
    views = {0: unsure, 1: WAITING, 2: view(Phase.BACKWARD, dead=True)._replace(unheard_s=9.0)}
    assert (late(views, STEP), lost(views, STEP)) == ([], [2])
    assert unheard(views) == ([0], 12.0)
    assert describe_peer(unsure, "rank 0", None, False).startswith("nothing was heard of rank 0 for 12 s, last seen")
