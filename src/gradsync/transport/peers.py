"""The view of one peer of this host: by its page, and by a pidfd that tells of its death at once.

A peer is anything with `look()`, `dead()`, `listen()`, `silent_s` and `close()`; `liveness` watches a set of
them. Peers on other hosts are in `RemoteStates`.

Peers of other hosts, seen through the rendezvous store by a thread of its own, until there are links to them: see
`other_hosts`.

Store calls may block far beyond their timeouts when the store's host is gone, so no other thread ever makes
one: a stuck thread here only means that nothing is heard any more, and `mute_s` tells for how long.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradsync.transport.heartbeat import INITIAL, Heartbeat, RankState, decode, encode
from gradsync.transport.host_processes import look_at


class Peer(Protocol):
    """A view of another rank."""

    @property
    def silent_s(self) -> float:
        """Seconds without a beat, of those in which this process itself was awake."""

    def look(self) -> RankState:
        """Return the state the peer last said it is in."""

    def runs(self) -> bool:
        """Return whether its process is known to run though it is silent: see [Late is not dead] in `liveness`."""

    def dead(self) -> bool:
        """Return whether it is known to have ended; False also means: cannot tell."""

    def listen(self, elapsed_s: float) -> None:
        """Called after every tick of our own, with how long it took."""

    def close(self) -> None: ...


class LocalPeer:
    """A rank of this host."""

    def __init__(self, pid: int, page: Heartbeat, pidfd: int) -> None:
        self.pid = pid
        self.silent_s = 0.0
        self._heartbeat = page
        self.pidfd = pidfd
        self._beat = -1

    @classmethod
    def find(cls, pid: int, fd: int, nonce: bytes) -> LocalPeer | None:
        page = Heartbeat.open(pid, fd, nonce)
        if page is None:
            return None
        try:
            return cls(pid, page, os.pidfd_open(pid))
        except OSError:
            page.close()
            return None

    def look(self) -> RankState:
        return self._heartbeat.read()

    def runs(self) -> bool:
        process = look_at(self.pid)
        return process is not None and not process.ended and not process.stopped and not self.dead()

    def dead(self) -> bool:
        # A poll object of its own each time: one that two threads share raises.
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def listen(self, elapsed_s: float) -> None:
        beat = self.look().beat
        self.silent_s = self.silent_s + elapsed_s if beat == self._beat else 0.0
        self._beat = beat

    def read_note(self) -> tuple[int, bytes]:
        """Return what it left on its board: see `other_hosts`."""
        return self._heartbeat.read_note()

    def close(self) -> None:
        self._heartbeat.close()
        os.close(self.pidfd)


_PERIOD_S, _MAX_PERIOD_S = 0.5, 8.0
_CLOSING_S = 2.0


class RemoteStates:
    """Writes our state to the store, and reads that of remote peers while somebody is curious."""

    def __init__(self, store: Store, rank: int, remote: Sequence[int], own: Callable[[], RankState]) -> None:
        """The `store` holds everybody's first state already, so that nobody waits for it."""
        self.states: dict[int, RankState] = dict.fromkeys(remote, INITIAL)
        self.rounds = 0  # how often all peers were read
        self.mute_s = 0.0
        self.lost = False  # the store's connection has ended: so has the process that kept it
        self._heard = 0
        self._curious = False
        self._users_store: Store | None = store
        self._store: Store | None = None  # ours, as soon as the thread has it; then we let go of the user's
        self._rank = rank
        self._own = own
        self._words: dict[int, RankState] = {}  # of ranks that we speak for
        self._stop = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradsync-remote-states", daemon=True)
        self._thread.start()

    def watch(self, curious: bool) -> None:
        """Read the peers too from the next turn on if `curious`. Cheap: called around every wait of every step."""
        if curious and not self._curious:
            self.mute_s = 0.0
        self._curious = curious

    def hear(self, remote: Sequence[int]) -> None:
        """Read these too from the next turn on; their first states are in the store."""
        self.states = dict.fromkeys(remote, INITIAL) | self.states

    def speak_for(self, rank: int, state: RankState) -> None:
        """A rank of this host cannot post, though its process runs: leave word in its place, in the next turn."""
        self._words[rank] = state

    def tell_at_once(self) -> None:
        """Do not wait for the next turn: there is news."""
        self._wake.set()

    def listen(self, elapsed_s: float) -> None:
        """Notice after every tick of our own whether the store still answers."""
        answered = self.rounds != self._heard
        self._heard = self.rounds
        self.mute_s = self.mute_s + elapsed_s if self._curious and not answered else 0.0

    def end_later(self) -> bool:
        """Write the last word and end, not waited for: nobody reads the store any more. Return whether it has."""
        self._stop = True
        self._wake.set()
        return not self._thread.is_alive()

    def close(self) -> None:
        """Write the last word and end, or leave the thread behind where the store does not answer."""
        self.end_later()
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        period = 0.0
        while not self._stop:
            self._wake.wait(period)
            self._wake.clear()
            try:
                if self._store is None:
                    self._store, self._users_store = self._connect(), None
                self._post(self._store)
                if self._curious and not self._stop:
                    self._fetch(self._store)
                period = _PERIOD_S
            except RuntimeError as error:
                self.lost = self.lost or isinstance(error, dist.DistNetworkError)
                # Tried again, less and less often: until it answers, the store counts as mute.
                period = min(max(2 * period, _PERIOD_S), _MAX_PERIOD_S)
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._post(self._store)

    def _connect(self) -> Store:
        """A connection of its own: a call that blocks must not hold up the user's store.

        To make it may take the store's whole timeout, if the store has just ended.
        """
        assert self._users_store is not None
        store: Store = self._users_store.clone()  # type: ignore[attr-defined]  # missing in the stubs
        store.set_timeout(timedelta(seconds=5))
        return store

    def _post(self, store: Store) -> None:
        store.set(str(self._rank), encode(self._own()))  # type: ignore[arg-type]  # bytes are taken as they are
        while self._words:
            rank, state = self._words.popitem()
            store.set(str(rank), encode(state))  # type: ignore[arg-type]

    def _fetch(self, store: Store) -> None:
        ranks = list(self.states)
        records = store.multi_get([str(rank) for rank in ranks]) if ranks else []
        for rank, record in zip(ranks, records, strict=True):
            # Anybody may write to the store: what is no state changes nothing.
            if (found := decode(bytes(record))) is not None:
                self.states[rank] = found[1]
        self.rounds += 1


class RemotePeer:
    """A rank of another host, as the store last showed it."""

    def __init__(self, remote_states: RemoteStates, rank: int) -> None:
        self.silent_s = 0.0
        self._mailbox = remote_states
        self._rank = rank
        self._beat = -1
        self._round = 0
        self._unheard_s = 0.0  # since the remote_states last read it

    def look(self) -> RankState:
        return self._mailbox.states[self._rank]

    def runs(self) -> bool:
        return False  # a rank of its host that sees it run speaks for it: then it is not silent

    def dead(self) -> bool:
        return False

    def listen(self, elapsed_s: float) -> None:
        self._unheard_s += elapsed_s
        if self._mailbox.rounds == self._round:
            return
        self._round = self._mailbox.rounds
        beat = self.look().beat
        self.silent_s = self.silent_s + self._unheard_s if beat == self._beat else 0.0
        self._beat, self._unheard_s = beat, 0.0

    def close(self) -> None:
        pass
