"""The session: one count of steps, one word of a failure, one goodbye."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradsync.errors import BackwardAborted, Disagreement, GradSyncError, NonFinite, PeerLost
from gradsync.transport.groups import Groups
from gradsync.transport.heartbeat import INITIAL, Phase, RankState
from gradsync.transport.session import LeaveResult, Session


class Heartbeat:
    """What a liveness is told."""

    def __init__(self) -> None:
        self.heartbeat = self
        self.state = INITIAL

    def at(self, step: int, phase: Phase, bucket: int = -1, culprits: tuple[int, ...] = ()) -> None:
        self.state = RankState(0, step, phase, bucket, culprits)


@pytest.fixture
def page() -> Heartbeat:
    return Heartbeat()


@pytest.fixture
def session(page: Heartbeat) -> Session:
    return Session(Groups(1, 3, (4, 5, 6)), page)  # type: ignore[arg-type]


def test_messages_and_peers_hear_of_one_step(session: Session, page: Heartbeat) -> None:
    session.continue_at(7)
    session.next_step()
    session.at(Phase.BACKWARD, 3)
    assert session.place(3) == "[rank 5/3 step 8 bucket 3]"
    assert page.state[1:4] == (8, Phase.BACKWARD, 3)


def test_an_error_is_said_once(session: Session, page: Heartbeat) -> None:
    assert session.give_up(KeyboardInterrupt())
    assert page.state.phase is Phase.FAILED
    session.at(Phase.COMPUTING)
    assert not session.give_up(ValueError())
    assert (session.failed, page.state.phase) == ("KeyboardInterrupt", Phase.COMPUTING)


def test_who_was_named_by_a_wait_stays_named(session: Session, page: Heartbeat) -> None:
    session.fail((2,), lost=True)
    assert session.give_up(PeerLost("rank 6 died", [6]))
    assert page.state[2:] == (Phase.LOST_PEER, -1, (2,))


@pytest.mark.parametrize("error", [NonFinite("NaN"), BackwardAborted("late")])
def test_what_ends_a_step_only_ends_no_session(session: Session, page: Heartbeat, error: GradSyncError) -> None:
    assert not session.give_up(error)
    assert (session.failed, page.state) == (None, INITIAL)
    session.next_call("all_reduce", "call")
    assert session.step == 1


def test_nothing_follows_a_failure(session: Session) -> None:
    with pytest.raises(OSError), session.failing():
        raise OSError
    with pytest.raises(GradSyncError, match=r"all_reduce cannot go on after an earlier call gave up \(OSError\)"):
        session.next_call("all_reduce", "call")
    assert session.goodbye(pytest.fail) == (False, None)


DISAGREEMENT = Disagreement("others are in step()")


@pytest.mark.parametrize(
    ("error", "parting"),
    [
        (None, LeaveResult(True, None)),
        (PeerLost("rank 6 died", [6]), LeaveResult(False, None)),
        (DISAGREEMENT, LeaveResult(False, DISAGREEMENT)),
        (NonFinite("NaN"), LeaveResult(True, None)),
    ],
)
def test_connections_close_when_all_are_here(
    session: Session, error: GradSyncError | None, parting: LeaveResult
) -> None:
    assert session.goodbye(_meeting(error)) == parting


def _meeting(error: GradSyncError | None) -> Callable[[], None]:
    def meet() -> None:
        if error is not None:
            raise error

    return meet
