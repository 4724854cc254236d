"""Liveness: silence is counted fairly, the last word stays readable, and closing leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from gradsync.plan.guard import Guard
from gradsync.transport import liveness as module
from gradsync.transport.awake_clock import MOST_S
from gradsync.transport.groups import Groups, group_of
from gradsync.transport.heartbeat import INITIAL, Heartbeat, OwnHeartbeat, Phase, RankState, encode
from gradsync.transport.host_meeting import declare_host
from gradsync.transport.liveness import Liveness
from gradsync.transport.peers import LocalPeer, RemotePeer, RemoteStates

GUARD = Guard(dead_after=2.0)
SOLO = Groups(0, 2, (0, 1))  # nobody communicates here


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alone(peers: dict[int, Any], guard: Guard = GUARD) -> Liveness:
    """A Liveness that met `peers`."""
    met = SimpleNamespace(peers=peers, hosts=((0, 1),), remote_states=None, absent=[])
    with patch.object(module, "GroupMeeting", lambda *_: met):
        return Liveness(SOLO, guard)


@pytest.fixture
def theirs() -> Any:
    page = OwnHeartbeat()
    yield page
    page.close()


def local(page: Heartbeat) -> LocalPeer:
    peer = LocalPeer.find(os.getpid(), page.fd, page.nonce)
    assert peer is not None
    return peer


# --- silence ---


def test_silence_lasts_until_the_next_beat(theirs: Heartbeat) -> None:
    peer = local(theirs)
    for _ in range(4):
        peer.listen(0.5)
    assert peer.silent_s == 1.5  # the first time it was heard, it spoke
    theirs.write(INITIAL._replace(beat=1))
    peer.listen(0.5)
    assert peer.silent_s == 0
    assert not peer.dead()
    peer.close()


def test_a_rank_that_stood_still_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch, theirs: Heartbeat) -> None:
    peer = local(theirs)
    own = alone({1: peer}, Guard(dead_after=100))
    until(lambda: own.state.beat > 0)
    silent_s, clock = peer.silent_s, time.monotonic
    # The clock shows that this process slept for an hour between two ticks.
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
    until(lambda: peer.silent_s > silent_s + MOST_S)
    view = own.peer_views()[1]
    assert not view.silent
    assert view.held_s == 0
    own.close()


def test_a_remote_peer_is_silent_only_as_far_as_the_store_was_read(tmp_path: Path) -> None:
    remote_states = RemoteStates(FileStore(str(tmp_path / "store"), 1), 0, [1], lambda: INITIAL)
    peer = RemotePeer(remote_states, 1)
    remote_states.rounds = 1
    peer.listen(0.5)
    peer.listen(60)  # the store did not answer for a minute
    assert peer.silent_s == 0
    remote_states.states[1] = INITIAL._replace(beat=9)
    remote_states.rounds = 2
    peer.listen(0.5)  # now it does, and the peer has beaten
    assert peer.silent_s == 0
    peer.listen(60)
    remote_states.rounds = 3
    peer.listen(0.5)  # now it does, and the peer has not
    assert peer.silent_s == 60.5
    remote_states.close()


def test_a_store_that_does_not_answer_is_mute_only_while_somebody_asks(tmp_path: Path) -> None:
    remote_states = RemoteStates(FileStore(str(tmp_path / "store"), 1), 0, [1], lambda: INITIAL)
    remote_states.close()  # its thread is out of the way: nobody reads the store
    remote_states.listen(9.0)
    assert remote_states.mute_s == 0
    remote_states.watch(True)
    remote_states.listen(9.0)
    remote_states.listen(9.0)
    assert remote_states.mute_s == 18.0
    remote_states.rounds += 1
    remote_states.listen(9.0)
    assert remote_states.mute_s == 0


# --- the store ---


@pytest.mark.parametrize("value", [b"", b"null", b"[" * 10_000, b"\xff" * 300, encode(INITIAL)[:-1]])
def test_a_hostile_value_in_the_store_changes_nothing(tmp_path: Path, value: bytes) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    theirs = PrefixStore("meeting", store)
    theirs.set("1", value)  # type: ignore[arg-type]
    remote_states = RemoteStates(PrefixStore("meeting", store), 0, [1], lambda: INITIAL)
    remote_states.watch(True)
    until(lambda: remote_states.rounds > 0)
    assert remote_states.states == {1: INITIAL}
    said = RankState(3, 4, Phase.LOST_PEER, -1, (2,))
    theirs.set("1", encode(said))  # type: ignore[arg-type]
    until(lambda: remote_states.states == {1: said})
    remote_states.close()
    assert not remote_states._thread.is_alive()


def test_the_last_word_reaches_the_store_before_the_mailbox_closes(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    said = [INITIAL]
    remote_states = RemoteStates(PrefixStore("meeting", store), 0, [], lambda: said[0])
    said[0] = RankState(1, 2, Phase.LEFT, -1, ())
    remote_states.close()
    assert PrefixStore("meeting", store).get("0") == encode(said[0])


# --- the end ---


def test_closing_says_so_and_leaves_no_thread_and_no_descriptor(theirs: Heartbeat) -> None:
    threads, descriptors = threading.active_count(), os.listdir("/proc/self/fd")
    own = alone({1: local(theirs)})
    seen = Heartbeat.open(os.getpid(), own.heartbeat.fd, own.heartbeat.nonce)
    assert seen is not None
    own.at(3, Phase.BACKWARD, 1)
    assert seen.read()[1:4] == (3, Phase.BACKWARD, 1)
    own.close()
    own.close()
    assert seen.read()[1:3] == (3, Phase.LEFT)
    seen.close()
    assert threading.active_count() == threads
    assert os.listdir("/proc/self/fd") == descriptors
    own.at(4, Phase.COMPUTING)  # too late, but no error
    assert own.peer_views() == {}


def test_who_gave_up_is_read_as_that_after_it_closed(theirs: Heartbeat) -> None:
    own = alone({1: local(theirs)})
    seen = Heartbeat.open(os.getpid(), own.heartbeat.fd, own.heartbeat.nonce)
    assert seen is not None
    own.at(3, Phase.LOST_PEER, culprits=(1,))
    own.close()
    assert seen.read()[1:] == (3, Phase.LOST_PEER, -1, (1,))
    seen.close()


def test_a_forked_child_does_not_speak_for_its_parent(monkeypatch: pytest.MonkeyPatch, theirs: Heartbeat) -> None:
    own = alone({1: local(theirs)})
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "getpid", lambda: -1)
        own.close()
    assert own.state.phase == Phase.COMPUTING
    assert own.peer_views().keys() == {1}
    own.close()


# --- the meeting ---


def _meet(view: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Who each peer is for us, after it was seen to speak, and the threads that remain."""
    before = set(threading.enumerate())  # a test that failed on purpose may have left some
    rank = dist.get_rank()
    if view == "remote":
        declare_host(f"h{rank}")
    find = LocalPeer.find
    if view == "one-sided" and rank == 0:
        LocalPeer.find = lambda *_: None  # type: ignore[method-assign,assignment]
    assert dist.group.WORLD is not None
    try:
        groups = group_of(dist.group.WORLD)
        groups.add_control()
        own = Liveness(groups, GUARD)
        groups.connect(lambda attempt: own.meet(attempt, 30), "the meeting")
        own.watch(True)
        own.at(10 + rank, Phase.BACKWARD)
        until(lambda: all(view.state.step == 10 + peer for peer, view in own.peer_views().items()))
        kinds = [(type(peer).__name__, peer.look().step) for peer in own._peers.values()]
        dist.barrier()
        own.close()
        groups.close()
    finally:
        declare_host(None)
        LocalPeer.find = find  # type: ignore[method-assign]
    return kinds, sorted(t.name for t in set(threading.enumerate()) - before if t.name.startswith("gradsync"))


@pytest.mark.parametrize("view", ["local", "remote", "one-sided"])
def test_ranks_find_each_other(run: Callable[..., list[Any]], view: str) -> None:
    found = run(_meet, view, ranks=3)
    for rank, (kinds, threads) in enumerate(found):
        kind = "RemotePeer" if view == "remote" or (view == "one-sided" and rank == 0) else "LocalPeer"
        assert kinds == [(kind, 10 + peer) for peer in range(3) if peer != rank]
        assert threads == []
