"""A record of who is alive and who is silent; apart from the data, so it works when data is stuck.

Every rank beats four times a second from a thread of its own, which needs the interpreter: a rank that is
stopped falls silent, and so does one whose interpreter is held. Peers on the same host are seen through their page and
pidfd, others through the first rank of each host, which speak to each other along a tree: see `speaker`. While the
connections for that are made the store serves, and never after.

    beat   ─┬──┬──┬──┬──✕            rank 2 is stopped
    seen    └──┴──┴──┴───·····10 s·····→ PeerLost naming rank 2, on every other rank

Silence is counted in ticks of our own: a rank that stood still itself blames nobody for it. Who is to blame
in the end is decided in `blame`.

Note [Late is not dead]
    A C function that keeps the interpreter (unpickling, a long collection of garbage) silences the beat of a rank that
    runs. On its own host the kernel says so: its process is there and not stopped. Then it is late, which `timeout`
    bounds, and the first rank of its host says so to others. That one is asked by its neighbours past its interpreter:
    see [Tokens] in `beat_links`. Only in attach, before there are links, `dead_after` is the bound for a rank that is
    alone on its host.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

from gradsync.cluster import Hosts
from gradsync.errors import SyncTimeout
from gradsync.plan.guard import Guard
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.blame import PeerView, blame, lost, stopped
from gradsync.transport.connecting import Attempt
from gradsync.transport.cuda_driver import only_look_on
from gradsync.transport.groups import Groups
from gradsync.transport.heartbeat import INITIAL, OwnHeartbeat, Phase, RankState
from gradsync.transport.host_meeting import GroupMeeting
from gradsync.transport.notable_ranks import NotableRank
from gradsync.transport.other_hosts import HeardByLinks, HeardFromSpeaker, OtherHosts
from gradsync.transport.peers import LocalPeer, Peer, RemotePeer, RemoteStates

_TICK_S = 0.25
_LINKS_TICK_S = 0.1  # where others may have sent something, which is to be passed on
_LINKING_TICK_S = 0.005  # while attach waits for them
_STORE_LINGERS_S = 2.0  # after all links are up: others may not know it yet, and read the store
_HELD_S = 2 * _TICK_S  # without a beat, though its process runs: then we speak for it
_REPORT_S = 2.0  # after an error: how long to wait for the others' word before blaming somebody
_QUIET_S = _REPORT_S / 2  # then, without better knowledge: who was silent for so long


class Liveness:
    """This rank's beat and its view of the others, by index in the group."""

    def __init__(self, groups: Groups, guard: Guard) -> None:
        self._groups = groups
        self._guard = guard
        self._pid = os.getpid()
        self.heartbeat = OwnHeartbeat()
        self._closed = False
        self._closing = threading.Lock()
        self._orphaned = False
        self._may_end: Callable[[], bool] = _now  # when it was orphaned: whether the thread may end,
        self._last_act: Callable[[], None] = _nothing  # and what it does then
        self._curious = False
        self._each_tick: Callable[[], Callable[[], None] | None] = lambda: None
        me = weakref.ref(self)  # with more, the two would keep each other, and the store, until a collection
        self._meeting = GroupMeeting(groups, self.heartbeat, lambda: _state_of(me()))
        self._other_hosts: OtherHosts | None = None
        self._members: tuple[int, ...] = ()  # this rank and those it speaks for
        self._linked_s = -1.0  # since all links are up; before that the store serves
        self._stop = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gradsync-liveness", daemon=True)
        if groups.size > 1:
            self._thread.start()
        # A rank that just ends says so, and no thread is inside the store when the interpreter goes.
        atexit.register(self.close)

    def meet(self, attempt: Attempt[None], patience: float) -> None:
        """Find the others, who may take `patience` seconds to come; every rank calls this, in a thread beside."""
        if self._groups.size > 1:
            self._meeting.hold(attempt, patience)

    def open_links(self, timeout: float) -> None:
        """Hear other hosts by the subgroups from now on; all ranks call this. One may be late for `timeout` seconds."""
        groups, tree = self._groups, self._groups.tree
        if len(self.hosts) < 2 or tree is None:
            return
        lowest = tree.climb(groups.rank)[0]
        if lowest.level == 0 and lowest.leader != groups.rank:
            speaker = self._peers[lowest.leader]
            assert isinstance(speaker, LocalPeer), "ranks of one host see each other"
            self._other_hosts = HeardFromSpeaker(speaker.read_note, groups.size)
            self._wake.set()
            return
        leave_note = self.heartbeat.leave_note
        # First: the thread that beats speaks for them as soon as there are links.
        self._members = lowest.members if lowest.level == 0 else (groups.rank,)
        self._other_hosts = HeardByLinks(tree, groups, self._guard.dead_after, timeout, leave_note)
        self._wake.set()

    def hear_all(self, attempt: Attempt[None]) -> None:
        """Return when every host is heard by its links: what comes after this needs no store."""
        pause = attempt.pauses()
        while self._other_hosts is not None and self._linked_s < 0:
            pause()

    @property
    def hosts(self) -> Hosts:
        """The ranks of each host, by index in the group; known when all have met."""
        return self._meeting.hosts

    @property
    def absent(self) -> list[int]:
        """The ranks that have not come to the meeting yet."""
        return self._meeting.absent

    def unanswered(self, waited: float) -> SyncTimeout:
        """The error if the meeting did not even end by its own bound."""
        return self._meeting.unanswered(waited)

    @property
    def _peers(self) -> dict[int, Peer]:
        return self._meeting.peers

    @property
    def _remote_states(self) -> RemoteStates | None:
        return self._meeting.remote_states

    def each_tick(self, look: Callable[[], None]) -> None:
        """Have the thread call this method four times a second, while its object lives."""
        self._each_tick = weakref.WeakMethod(look)

    def _tick(self) -> None:
        """Call what was asked for, and keep nothing of it; whatever it raises, the beat goes on."""
        look = self._each_tick()
        if look is not None:
            with contextlib.suppress(Exception):
                look()

    # What this rank says

    @property
    def state(self) -> RankState:
        """The state that this rank last said it is in."""
        return self.heartbeat.state

    def at(self, step: int, phase: Phase, bucket: int = -1, culprits: tuple[int, ...] = ()) -> None:
        """Say where this rank is, and that soon, if it is no more in its steps."""
        self.heartbeat.at(step, phase, bucket, culprits)
        if phase >= Phase.FAILED:
            self._tell_at_once()

    def _tell_at_once(self) -> None:
        self._wake.set()
        if (remote_states := self._remote_states) is not None:
            remote_states.tell_at_once()

    # What this rank sees

    def watch(self, waiting: bool) -> None:
        """Tell whether somebody waits: the store is read only then."""
        self._curious = waiting
        if (by_store := self._by_store) is not None:
            by_store.watch(waiting)

    def peer_views(self) -> dict[int, PeerView]:
        """Ranks as they are just now: all others of this host, and those of other hosts that are worth naming."""
        return self._look()

    def investigate(self) -> tuple[list[int], dict[int, PeerView]]:
        """Wait a moment for the facts after the transport failed; then say whose fault it was, and what was seen."""
        self.watch(True)
        self._tell_at_once()
        clock = AwakeClock()
        # Of ranks that are out of view others tell, as soon as those have found them silent.
        all_in_view = len(self._peers) == self._groups.size - 1
        patience = _REPORT_S if all_in_view else _REPORT_S + self._guard.dead_after
        while (waited := clock.look()) < patience:
            views = self.peer_views()
            guilty, excused = blame(views, stopped(views), self.state.step, self._groups.size)
            if culprits := lost(views, self.state.step) or guilty or (excused if waited >= _QUIET_S else []):
                return culprits, views
            time.sleep(0.02)
        # Nobody is known to be gone: the remote rank that stayed silent all this time is the best guess.
        views = self._look(_QUIET_S)
        return lost(views, self.state.step), views

    def pid(self, rank: int) -> int | None:
        """The process of a rank of this host."""
        peer = self._peers.get(rank)
        return peer.pid if isinstance(peer, LocalPeer) else None

    def pidfds(self) -> dict[int, int]:
        """Return a pidfd for each rank of this host but itself, which tells of the end; valid until close."""
        return {rank: peer.pidfd for rank, peer in self._peers.items() if isinstance(peer, LocalPeer)}

    def close(self) -> None:
        """Leave. What a rank said when it gave up stays: the others need it to blame the right one."""
        # In a forked child the page is still the parent's, and its lock may be held by nobody.
        if self._closed or os.getpid() != self._pid:
            return
        self._leave()
        self._stay_with_the_store()
        self._stop = True
        self._wake.set()
        # The garbage collector may have us closed by any thread, this one too.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with self._closing:  # the thread may have done it: see `orphan`
            if not self._closed:
                self._finish()

    def orphan(self, may_end: Callable[[], bool] | None = None, last_act: Callable[[], None] | None = None) -> None:
        """Let the thread close this, as nobody else will: as soon as it may, and before that what else is to be done.

        Called by the garbage collector, perhaps in that thread and while it holds a lock: so nothing else is done here.
        """
        self._may_end, self._last_act = may_end or self._may_end, last_act or self._last_act
        self._orphaned = self._curious = True

    def is_ahead(self) -> bool:
        """Return whether a rank that lives has not come as far as this one, and may still need it."""
        views = self.peer_views().values()
        return any(not (view.stopped or view.unheard_s) and view.state.step < self.state.step for view in views)

    @property
    def store_is_mute(self) -> bool:
        """True if the store does not answer, while it alone tells of other hosts."""
        return self._by_store is not None and self._by_store.mute_s >= self._guard.dead_after

    @property
    def _by_store(self) -> RemoteStates | None:
        """The states in the store, as long as they count."""
        return self._remote_states if self._linked_s < 0 else None

    def _leave(self) -> None:
        if self.state.phase not in (Phase.FAILED, Phase.LOST_PEER):
            # At exit: the interpreter knows whether it ends by an exception.
            self.at(self.state.step, Phase.LEFT if getattr(sys, "last_value", None) is None else Phase.FAILED)
        if self._other_hosts is not None:  # in this very thread: connections may end as soon as this returns
            self._other_hosts.turn(0.0, self._ranks_spoken_for(), at_once=True)

    def _stay_with_the_store(self) -> None:
        """Wait a moment where the store ends with rank 0, so that the others read there whom it lost.

        Else the first to notice a death would be blamed by the last, which hears nothing of anybody any more.
        """
        keeps = self._by_store is not None and self._groups.ranks[self._groups.rank] == 0
        if not keeps or self.state.phase != Phase.LOST_PEER or threading.current_thread() is self._thread:
            return
        self.watch(True)
        bound = AwakeClock(_REPORT_S)
        while not bound.over() and not all(view.stopped for view in self.peer_views().values()):
            time.sleep(0.02)

    def _finish(self) -> None:
        atexit.unregister(self.close)
        if self._remote_states is not None:
            self._remote_states.close()
        self._closed = True
        self._other_hosts = None  # what was posted on the links goes with them
        for peer in self._peers.values():
            peer.close()
        self.heartbeat.close()

    def _look(self, guess_after: float = float("inf")) -> dict[int, PeerView]:
        """The others as they are just now; after `guess_after` seconds who is not heard of counts as silent.

        That is for those whose death nobody here can see.
        """
        if self._closed:
            return {}
        remote_silent_after = min(guess_after, self._guard.dead_after)
        by_store = self._by_store
        mute_s = by_store.mute_s if by_store is not None and by_store.mute_s >= remote_silent_after else 0.0
        keeper = self._store_keeper() if by_store is not None and by_store.lost else None
        views = {}
        for rank, peer in self._peers.items():
            remote = isinstance(peer, RemotePeer)
            silent = peer.silent_s >= (remote_silent_after if remote else self._guard.dead_after)
            held_s = peer.silent_s if silent and peer.runs() else 0.0
            gone = (silent and not held_s) or (rank == keeper and mute_s > 0)
            views[rank] = PeerView(peer.look(), peer.dead(), gone, held_s, mute_s if remote and not gone else 0.0)
        other_hosts = self._other_hosts
        if self._linked_s < 0 or other_hosts is None:
            return views
        for rank, state, dead, silent, held_s, unheard_s in other_hosts.known(guess_after):
            if rank not in views and rank != self._groups.rank:
                views[rank] = PeerView(state, dead, silent, held_s, unheard_s)
        return dict(sorted(views.items()))

    def _ranks_spoken_for(self) -> list[NotableRank]:
        """Return this rank and those of its host for which it speaks, as they are just now."""
        found = [NotableRank(self._groups.rank, self.state)] if self._members else []
        for rank in self._members[1:]:
            peer = self._peers[rank]
            silent = peer.silent_s >= self._guard.dead_after
            held_s = peer.silent_s if silent and peer.runs() else 0.0
            found.append(NotableRank(rank, peer.look(), peer.dead(), silent and not held_s, held_s))
        return found

    def _speak_for_the_held(self, remote_states: RemoteStates) -> None:
        """Leave word in the store for ranks of this host that run though they are silent: see [Late is not dead]."""
        for rank, peer in self._peers.items():
            if isinstance(peer, LocalPeer) and peer.silent_s >= _HELD_S and peer.runs():
                state = peer.look()
                # Any beat that its readers have not just seen; its own next one differs too.
                remote_states.speak_for(rank, state._replace(beat=state.beat + (self.state.beat << 32)))

    def _store_keeper(self) -> int | None:
        """The rank that goes down with the store: rank 0 keeps it, or is on the host of the agent that does."""
        rank = self._groups.ranks.index(0) if 0 in self._groups.ranks else -1
        return rank if isinstance(self._peers.get(rank), RemotePeer) else None

    def _beat(self) -> None:
        clock, since_look_s = AwakeClock(), 0.0
        only_look_on()
        while True:
            news = self._wake.wait(self._pause_s())
            self._wake.clear()
            if self._stop or (self._orphaned and self._may_end()):
                break
            elapsed_s = clock.tick()  # however long it was, a second at most: see [Time awake]
            since_look_s += elapsed_s
            look = news or since_look_s >= _TICK_S
            if look:
                self._look_after_this_host(since_look_s)
                since_look_s = 0.0
            self._hear_other_hosts(elapsed_s, look)
            if look:
                self._tick()
        if self._orphaned:
            self._leave()  # the others know before a connection ends
            self._other_hosts = None  # the last act closes the channels of the links
            self._last_act()  # the process does not exit meanwhile: `close` waits for this thread
            self.close()

    def _pause_s(self) -> float:
        if self._other_hosts is not None and self._linked_s < 0:
            return _LINKING_TICK_S
        return _LINKS_TICK_S if self._members else _TICK_S

    def _look_after_this_host(self, elapsed_s: float) -> None:
        self.heartbeat.beat()
        by_store = self._by_store
        if by_store is not None:
            by_store.watch(self._curious)  # it may have been made while somebody waits already
            by_store.listen(elapsed_s)
        for peer in self._peers.values():
            peer.listen(elapsed_s)
        if by_store is not None:
            self._speak_for_the_held(by_store)

    def _hear_other_hosts(self, elapsed_s: float, look: bool) -> None:
        """Take a turn of the links, and end the store's service when all of them are up."""
        if self._other_hosts is None:
            return
        self._other_hosts.turn(elapsed_s, self._ranks_spoken_for() if look else None)
        if self._linked_s < 0 and self._other_hosts.complete:
            self.watch(False)  # from here on nothing is read in the store
            self._linked_s = 0.0
            self._meeting.see_local()
        elif self._linked_s >= 0:
            self._linked_s += elapsed_s
            if self._linked_s >= _STORE_LINGERS_S:
                self._meeting.leave_store()


def _now() -> bool:
    return True


def _nothing() -> None: ...


def _state_of(liveness: Liveness | None) -> RankState:
    return INITIAL if liveness is None else liveness.state
