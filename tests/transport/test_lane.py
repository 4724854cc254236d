"""The lane: every wait is bounded, and every error names rank, step and bucket."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gradsync.errors import PeerFault, PeerLost, SyncTimeout
from gradsync.plan.guard import Guard
from gradsync.transport import abandoned
from gradsync.transport.blame import PeerView
from gradsync.transport.groups import Groups
from gradsync.transport.heartbeat import INITIAL, Phase, RankState
from gradsync.transport.lane import Lane, Pending
from gradsync.transport.sockets import connections, cut

STEP = 7
RANKS = (4, 5, 6)  # the global ranks of this group; we are the first


class Work:
    """A collective that completes or fails when told."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[list[Any]] = torch.futures.Future()
        self._error: RuntimeError | None = None

    def get_future(self) -> Any:
        return self._future

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def complete(self) -> None:
        self._future.set_result([])

    def fail(self) -> None:
        self._error = RuntimeError("Connection closed by peer [127.0.0.1]:1\nGLHF")
        self._future.set_exception(self._error)


class Peers:
    """A liveness that shows what the test says, look by look; the last view stays."""

    hosts = ((0,), (1,), (2,))
    absent = ()
    store_is_mute = False

    def each_tick(self, look: Any) -> None:
        """Nothing is under way on a GPU."""

    def __init__(self) -> None:
        self.heartbeat = self
        self.state = INITIAL
        self.said: list[RankState] = []
        self.looks: Iterator[Any] = iter(())
        self.now = {1: waiting(), 2: waiting()}
        self.culprits: list[int] = []
        self.ahead = False
        self.orphan()

    def at(self, step: int, phase: Phase, bucket: int = -1, culprits: tuple[int, ...] = ()) -> None:
        self.state = RankState(0, step, phase, bucket, culprits)
        self.said.append(self.state)

    def peer_views(self) -> dict[int, PeerView]:
        look = next(self.looks, None)
        if callable(look):
            look()
        elif look is not None:
            self.now = look
        return self.now

    def investigate(self) -> tuple[list[int], dict[int, PeerView]]:
        return self.culprits, self.now

    def watch(self, waiting: bool) -> None: ...

    def orphan(self, may_end: Callable[[], bool] = bool, last_act: Callable[[], object] = int) -> None:
        self.may_end, self.last_act = may_end, last_act

    def is_ahead(self) -> bool:
        return self.ahead

    def pid(self, rank: int) -> int | None:
        return 100 + rank


def waiting(**changes: Any) -> PeerView:
    state = RankState(0, STEP, Phase.WAITING, -1, ())._replace(
        **{k: v for k, v in changes.items() if k in RankState._fields}
    )
    return PeerView(state, changes.get("dead", False), changes.get("silent", False))


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def lane(peers: Peers) -> Lane:
    return make(peers, timeout=30)


def make(peers: Peers, timeout: float, warn_after: float = 30) -> Lane:
    lane = Lane(Groups(0, 3, RANKS), peers, Guard(warn_after=warn_after), timeout)  # type: ignore[arg-type]
    lane.session.continue_at(STEP)
    lane.name_buckets(lambda bucket: f"bucket {bucket} (weight {bucket})")
    return lane


def launch(lane: Lane, what: str = "the step header", bucket: int = -1) -> tuple[Work, Pending]:
    work = Work()
    return work, lane.launch(lambda: work, what, 0, bucket)  # type: ignore[arg-type,return-value]


def raised(lane: Lane, pending: Pending, kind: type[PeerFault]) -> PeerFault:
    with pytest.raises(kind) as caught:
        lane.wait(pending)
    for work in lane._under_way:
        work._done.set()
    return caught.value


def test_a_wait_ends_with_the_work_and_says_meanwhile_that_it_waits(lane: Lane, peers: Peers) -> None:
    work, pending = launch(lane)
    lane.at(Phase.BACKWARD, 3)
    peers.looks = iter([None, work.complete])
    lane.wait(pending)
    assert [(s.phase, s.bucket) for s in peers.said] == [(Phase.BACKWARD, 3), (Phase.WAITING, -1), (Phase.BACKWARD, 3)]


def test_a_dead_rank_is_named_by_its_global_rank_with_step_and_bucket(lane: Lane, peers: Peers) -> None:
    _, pending = launch(lane, bucket=2)
    peers.now = {1: waiting(), 2: waiting(phase=Phase.BACKWARD, dead=True)}
    error = raised(lane, pending, PeerLost)
    assert error.ranks == (6,)
    assert str(error).startswith(
        "[rank 4/3 step 7 bucket 2] rank 6 (pid 102) died in step 7, while this rank was in bucket 2 (weight 2)."
    )
    assert peers.state == RankState(0, STEP, Phase.LOST_PEER, -1, (2,))


def test_the_oldest_bucket_on_the_wire_is_named_whatever_is_waited_for(lane: Lane, peers: Peers) -> None:
    works = [launch(lane, bucket=bucket)[0] for bucket in range(3)]
    works[0].complete()
    _, header = launch(lane)
    peers.now = {1: waiting(phase=Phase.BACKWARD, silent=True), 2: waiting()}
    error = raised(lane, header, PeerLost)
    assert str(error).startswith("[rank 4/3 step 7 bucket 1] rank 5 (pid 101) gives no sign of life")
    assert "while this rank was in bucket 1 (weight 1)" in str(error)


def test_data_may_still_arrive_after_its_sender_gave_up_or_ended(lane: Lane, peers: Peers) -> None:
    for gone in (
        waiting(phase=Phase.FAILED),
        waiting(phase=Phase.LEFT, dead=True),
        waiting(phase=Phase.COMPUTING, step=STEP + 1, dead=True),
    ):
        work, pending = launch(lane)
        peers.looks = iter([{1: gone, 2: waiting()}, work.complete])
        lane.wait(pending)


@pytest.mark.parametrize(
    ("view", "culprit", "kind", "describe_peer"),
    [
        (waiting(phase=Phase.FAILED), 5, PeerLost, "rank 5 (pid 101) failed in step 7"),
        (waiting(phase=Phase.LEFT), 5, PeerLost, "rank 5 (pid 101) left in step 7"),
        (waiting(phase=Phase.LEFT, dead=True), 5, PeerLost, "rank 5 (pid 101) left in step 7"),
        (waiting(phase=Phase.FAILED, culprits=(2,)), 6, SyncTimeout, "rank 6 (pid 102) is alive but still backward"),
        (waiting(phase=Phase.LOST_PEER, culprits=(2,)), 6, PeerLost, "rank 6 (pid 102) gives no sign of life"),
        (waiting(phase=Phase.FAILED, culprits=(0,)), 4, SyncTimeout, "the others gave up waiting for this rank"),
    ],
)
def test_who_gave_up_is_noticed_long_before_the_timeout(
    lane: Lane, peers: Peers, view: PeerView, culprit: int, kind: type[PeerFault], describe_peer: str
) -> None:
    _, pending = launch(lane)
    peers.now = {1: view, 2: waiting(phase=Phase.BACKWARD)}
    error = raised(lane, pending, kind)
    assert error.ranks == (culprit,)
    assert describe_peer in str(error)


def test_late_ranks_are_named_after_the_timeout_and_before_it_in_a_warning(peers: Peers) -> None:
    lane = make(peers, timeout=0.3, warn_after=0.1)
    _, pending = launch(lane)
    peers.now = {1: waiting(), 2: waiting(phase=Phase.COMPUTING, step=STEP - 1)}
    doing = r"rank 6 \(pid 102\) is alive but still computing in step 6"
    with pytest.warns(UserWarning, match=rf"^\[rank 4/3 step 7\] has waited 0 s for the step header: {doing}$"):
        error = raised(lane, pending, SyncTimeout)
    assert error.ranks == (6,)
    assert re.search(rf"waited 0\.\d s for the step header: {doing}", str(error))
    assert peers.state == RankState(0, STEP, Phase.FAILED, -1, (2,))


def test_nobody_is_named_if_every_rank_waits(peers: Peers) -> None:
    lane = make(peers, timeout=0.2)
    _, pending = launch(lane)
    error = raised(lane, pending, SyncTimeout)
    assert error.ranks == ()
    assert "every rank is here, but the data does not arrive" in str(error)


@pytest.mark.parametrize("waits", [True, False], ids=["while-waiting", "before"])
def test_a_transport_error_names_who_was_found_gone(lane: Lane, peers: Peers, waits: bool) -> None:
    work, pending = launch(lane, bucket=0)
    peers.culprits = [1]
    peers.now = {1: waiting(phase=Phase.COMPUTING, dead=True), 2: waiting()}
    if waits:
        peers.now = {1: waiting(), 2: waiting()}
        gone = {1: waiting(phase=Phase.COMPUTING, dead=True), 2: waiting()}
        peers.looks = iter([lambda: (work.fail(), setattr(peers, "now", gone)), peers.now])
    else:
        work.fail()
    error = raised(lane, pending, PeerFault)
    assert error.ranks == (5,)
    assert str(error).startswith("[rank 4/3 step 7 bucket 0]")


def test_a_transport_error_without_a_culprit_shows_what_the_transport_said(lane: Lane) -> None:
    work, pending = launch(lane, bucket=0)
    work.fail()
    error = raised(lane, pending, SyncTimeout)
    assert error.ranks == ()
    assert "the transport failed in bucket 0 (weight 0) (Connection closed by peer [127.0.0.1]:1)" in str(error)


def test_an_error_at_launch_is_explained_too(lane: Lane, peers: Peers) -> None:
    peers.culprits, peers.now = [2], {1: waiting(), 2: waiting(phase=Phase.BACKWARD, dead=True)}

    def issue() -> Any:
        raise RuntimeError("no connection")

    with pytest.raises(PeerLost) as caught:
        lane.launch(issue, "bucket 1", 0, 1)
    assert caught.value.ranks == (6,)


# --- sockets ---


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_cut_wires_end_and_listening_sockets_stay(listener: socket.socket) -> None:
    before = connections()
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    with near, far:
        new = connections() - before
        assert {fd for fd, _ in new} == {near.fileno(), far.fileno()}
        cut({wire for wire in new if wire[0] == near.fileno()})
        assert far.recv(1) == b""
        assert near.recv(1) == b""
    cut(new)  # what does not exist any more is left alone
    with socket.create_connection(listener.getsockname()):
        pass


def test_what_is_under_way_is_ended_at_exit(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = make(peers, timeout=30)
    work, pending = launch(lane)
    monkeypatch.setattr(abandoned, "cut", lambda sockets: work.fail())
    lane._end()
    assert pending.landed(0)
    assert not pending.succeeded


def test_a_dropped_lane_ends_when_nothing_is_under_way_and_nobody_is_behind(peers: Peers) -> None:
    lane = make(peers, timeout=30)
    work, _ = launch(lane)
    del lane
    assert not peers.may_end()
    work.complete()
    peers.ahead = True
    assert not peers.may_end()
    peers.ahead = False
    assert peers.may_end()


def test_or_when_its_time_is_over(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = make(peers, timeout=0.0)
    work, pending = launch(lane)
    monkeypatch.setattr(abandoned, "cut", lambda sockets: work.fail())
    del lane
    assert peers.may_end()
    assert not pending.landed(0)
    wind_up = peers.last_act
    wind_up()
    assert pending.landed(0)
    assert not pending.succeeded


def test_one_that_gave_up_ends_at_once(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = make(peers, timeout=30)
    work, pending = launch(lane)
    monkeypatch.setattr(abandoned, "cut", lambda sockets: work.fail())
    lane.fail()
    del lane
    assert pending.landed(0)
