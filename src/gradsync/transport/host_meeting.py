"""How the ranks of a group find each other: by page where they share a host, else through the store.

    set record  ─  see every record: map its page, or hear of it by the store  ─  set whom I see  ─  see every row

Only the store is used, and nothing waits in it: so the first connection of the group is made when everybody's death
can be seen already. A rank of this host is looked after from the moment its record is here.

Which host this process is on, as the user declared it or as the kernel tells.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from gradsync.cluster import Hosts
from gradsync.errors import GradSyncError, PeerLost, SyncTimeout, listed, place
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.connecting import Attempt
from gradsync.transport.groups import Groups, fresh_prefix, give_prefix_back
from gradsync.transport.heartbeat import Heartbeat, RankState, encode
from gradsync.transport.host_processes import ended, is_gone, remember
from gradsync.transport.peers import LocalPeer, Peer, RemotePeer, RemoteStates

_declared: str | None = None


def declare_host(name: str | None) -> None:
    """Make this process count as being on host `name`; None goes back to what the kernel says."""
    global _declared
    _declared = name


def host_identity() -> str:
    """A text that two processes share iff they may share a host: one boot, one pid and network namespace.

    Containers count as hosts of their own, and so do network namespaces: what is meant to go over a slow link
    does not take a short cut through memory. Whether they do share one shows when they open each other's memory.
    """
    return kernel_identity() if _declared is None else f"declared:{_declared}"


def kernel_identity() -> str:
    """A text that two processes share iff the kernel shows both the same pids: a number is one process in both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
        return f"{boot}:{spaces}"
    except OSError:
        return f"name:{socket.gethostname()}"


_RECORD = struct.Struct("<32s32sqq16s")  # host, kernel, pid, fd, nonce
_RECORDS, _SIGHTS, _BEATS = "record", "view", "beat"


class GroupMeeting:
    """Whom we met, the remote states if anybody is out of view, and who shares a host; filled in while `hold` runs."""

    def __init__(self, groups: Groups, page: Heartbeat, own: Callable[[], RankState]) -> None:
        self.peers: dict[int, Peer] = {}  # by index in the group; replaced, never changed: another thread reads it
        self.remote_states: RemoteStates | None = None
        self.hosts: Hosts = ((groups.rank,),) if groups.size == 1 else ()
        self.absent: list[int] = []  # who has not come yet
        self._groups = groups
        self._heartbeat = page
        self._own = own

    def hold(self, attempt: Attempt[Any], patience: float) -> None:
        """Find every peer; all members of the group call this, and may take `patience` seconds to come."""
        groups = self._groups
        ranks, rank, meeting_place = groups.ranks, groups.ranks[groups.rank], groups.meeting_place()
        try:
            store = fresh_prefix(meeting_place, ranks, rank)
            try:
                self._hold(store, attempt, AwakeClock(patience))
            except BaseException:
                if self.absent:
                    store.delete_key(_key(_RECORDS, groups.rank))
                    give_prefix_back(meeting_place, ranks, rank)
                raise
        except GradSyncError:
            raise
        except RuntimeError as error:
            # Who has seen rank 0 looks after it, and sees what became of it.
            if rank != 0 and 0 in ranks and ranks.index(0) not in self.peers:
                raise self._without_a_store(error) from error
            raise

    def see_local(self) -> None:
        """Other hosts are heard otherwise from now on."""
        self.peers = {rank: peer for rank, peer in self.peers.items() if isinstance(peer, LocalPeer)}

    def leave_store(self) -> None:
        """Nobody reads there any more; called until it is left."""
        if self.remote_states is not None and self.remote_states.end_later():
            self.remote_states = None

    def unanswered(self, waited: float) -> SyncTimeout:
        """The error if the store did not answer at all, so that nobody's absence is sure."""
        groups = self._groups
        absent = [groups.ranks[rank] for rank in self.absent]
        return SyncTimeout(
            f"{place(groups.ranks[groups.rank], groups.size)} waited {waited:g} s in attach for {listed(absent)}, and "
            "the store in which the ranks meet does not answer; see whether the process that keeps it is stopped",
            absent,
        )

    def _hold(self, store: Store, attempt: Attempt[Any], bound: AwakeClock) -> None:
        groups = self._groups
        host, kernel = (sha256(identity().encode()).digest() for identity in (host_identity, kernel_identity))
        mine = _RECORD.pack(host, kernel, os.getpid(), self._heartbeat.fd, self._heartbeat.nonce)
        # Before the record: who has seen that reads the other, and must not wait for it.
        store.set(_key(_BEATS, groups.rank), encode(self._own()))  # type: ignore[arg-type]  # bytes are taken as they are
        store.set(_key(_RECORDS, groups.rank), mine)  # type: ignore[arg-type]
        records, gone = {groups.rank: mine}, []

        def see(rank: int, record: bytes) -> None:
            records[rank] = record
            their_host, their_kernel, pid, fd, nonce = _RECORD.unpack(record)
            local = LocalPeer.find(pid, fd, nonce) if their_host == host else None
            if local is not None:
                self.peers = dict(sorted({**self.peers, rank: local}.items()))
                remember(groups.ranks[rank], pid)
            elif (their_host, their_kernel) == (host, kernel) and is_gone(pid):
                gone.append(groups.ranks[rank])

        def check() -> None:
            if gone:  # all whose records are there: who noticed the first has ended too by the time another comes
                raise self._ended(gone)

        self._take(store, _RECORDS, attempt, bound, see, check)
        remote = [rank for rank in range(groups.size) if rank != groups.rank and rank not in self.peers]
        if remote:
            self._write_home(store, remote)
        self._compare_sights(store, attempt, bound, records)

    def _compare_sights(
        self, store: Store, attempt: Attempt[Any], bound: AwakeClock, records: dict[int, bytes]
    ) -> None:
        """Sight may be one-sided: who is out of view for anybody must write to the store.

        This also keeps every page open until everybody has looked.
        """
        groups = self._groups
        local = {rank for rank, peer in self.peers.items() if isinstance(peer, LocalPeer)} | {groups.rank}
        rows = {groups.rank: bytes(rank in local for rank in range(groups.size))}
        store.set(_key(_SIGHTS, groups.rank), rows[groups.rank])  # type: ignore[arg-type]

        def see(rank: int, row: bytes) -> None:
            rows[rank] = row
            if not row[groups.rank] and self.remote_states is None:
                self._write_home(store, [])

        self._take(store, _SIGHTS, attempt, bound, see)
        order = range(groups.size)
        self.hosts = _hosts([_RECORD.unpack(records[rank])[0] for rank in order], [rows[rank] for rank in order])

    def _write_home(self, store: Store, remote: Sequence[int]) -> None:
        """Begin to beat through the store, and to hear these."""
        self.remote_states = remote_states = RemoteStates(
            PrefixStore(_BEATS, store), self._groups.rank, remote, self._own
        )
        self.peers = dict(sorted((self.peers | {rank: RemotePeer(remote_states, rank) for rank in remote}).items()))

    def _take(
        self,
        store: Store,
        kind: str,
        attempt: Attempt[Any],
        bound: AwakeClock,
        see: Callable[[int, bytes], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Show everybody's value to `see`, each as soon as it is there; then `check` what there is."""
        groups, pause = self._groups, attempt.pauses()
        missing = [rank for rank in range(groups.size) if rank != groups.rank]
        while missing:
            keys = [_key(kind, rank) for rank in missing]
            here = missing if store.check(keys) else [rank for rank in missing if store.check([_key(kind, rank)])]
            values = store.multi_get([_key(kind, rank) for rank in here]) if here else []
            for rank, value in zip(here, values, strict=True):
                see(rank, bytes(value))
            check()
            missing = [rank for rank in missing if rank not in here]
            if kind == _RECORDS:
                self.absent = missing
            if missing:
                self._check(missing, kind, bound)
                pause()

    def _check(self, missing: list[int], kind: str, bound: AwakeClock) -> None:
        """Raise when nobody needs to wait for these any more."""
        groups = self._groups
        ranks, where = [groups.ranks[rank] for rank in missing], place(groups.ranks[groups.rank], groups.size)
        if gone := [rank for rank in ranks if ended(rank)]:
            raise self._ended(gone)
        if bound.over():
            what = "did not come; every rank of the group must call it, equally often and in the same order"
            if kind == _SIGHTS:
                what = "came and went no further; look at what holds them up"
            raise SyncTimeout(f"{where} waited {bound.seconds:g} s in attach, but {listed(ranks)} {what}", ranks)

    def _ended(self, ranks: list[int]) -> PeerLost:
        groups = self._groups
        processes, own = ("process", "its own") if len(ranks) == 1 else ("processes", "their own")
        return PeerLost(
            f"{place(groups.ranks[groups.rank], groups.size)} the {processes} of {listed(ranks)} ended before all had "
            f"met in attach; see {own} output for why, and let the launcher restart all ranks",
            ranks,
        )

    def _without_a_store(self, error: RuntimeError) -> PeerLost:
        groups = self._groups
        where = place(groups.ranks[groups.rank], groups.size)
        reason = str(error).strip().split("\n")[0]
        return PeerLost(
            f"{where} the store in which the ranks meet was lost in attach ({reason}); rank 0 keeps it, or the "
            "launcher: see whether that ended",
            [0],
        )


def _hosts(identities: list[bytes], in_sight: list[bytes]) -> Hosts:
    """Ranks that say they are on one host, and in fact all see each other; others count as hosts of their own.

    >>> _hosts([b"a", b"b", b"a"], [bytes([1, 0, 1]), bytes([0, 1, 0]), bytes([1, 0, 1])])
    ((0, 2), (1,))
    >>> _hosts([b"a", b"a"], [bytes([1, 1]), bytes([0, 1])])
    ((0,), (1,))
    """
    together: dict[bytes, list[int]] = {}
    for rank, identity in enumerate(identities):
        together.setdefault(identity, []).append(rank)
    hosts: list[tuple[int, ...]] = []
    for ranks in together.values():
        mutual = all(in_sight[a][b] for a in ranks for b in ranks)
        hosts += [tuple(ranks)] if mutual else [(rank,) for rank in ranks]
    return tuple(sorted(hosts))


def _key(kind: str, rank: int) -> str:
    return f"{kind}/{rank}"
