"""The meeting of a group's ranks: they find each other by page where they share a host, else through the store.

    set record  ─  see records: map the page, or hear of it by the store  ─  say whom I see  ─  all have seen each other

`host_discovery` says which records, and in which order; here they are looked at, by a thread that waits in between.
Only the store is used, and nothing waits in it: so the first connection of the group is made when everybody's death
can be seen already. A rank of this host is looked after from the moment its record is here.

Which host this process is on, as the user declared it or as the kernel tells.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from gradsync.cluster import Hosts
from gradsync.errors import GradSyncError, PeerFault, PeerLost, SyncTimeout, listed, place
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.connecting import Attempt
from gradsync.transport.groups import Groups, fresh_prefix, give_prefix_back
from gradsync.transport.heartbeat import OwnHeartbeat, Phase, RankState, encode
from gradsync.transport.host_discovery import BEATS, HOST_NBYTES, HostDiscovery
from gradsync.transport.host_processes import ended, is_gone, remember
from gradsync.transport.peers import LocalPeer, Peer, RemotePeer, RemoteStates
from gradsync.transport.store_tree import BLOCK

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


_RECORD = struct.Struct(f"<{HOST_NBYTES}s32sqq16s")  # host, kernel, pid, fd, nonce
_FAREWELL_S = 1.5  # for others to read why rank 0 gives up, before the store ends with it


class GroupMeeting:
    """The ranks we met, the remote states if anybody is out of view, and who shares a host; filled in by `hold`."""

    def __init__(self, groups: Groups, page: OwnHeartbeat, own: Callable[[], RankState]) -> None:
        self.peers: dict[int, Peer] = {}  # by index in the group; replaced, never changed: another thread reads it
        self.remote_states: RemoteStates | None = None
        self.hosts: Hosts = ((groups.rank,),) if groups.size == 1 else ()
        self.absent: list[int] = []  # who has not come yet
        self._groups = groups
        self._heartbeat = page
        self._own = own
        self._store: Store | None = None  # of this meeting alone

    def hold(self, attempt: Attempt[Any], patience: float) -> None:
        """Find every peer; all members of the group call this, and may take `patience` seconds to come."""
        groups, bound = self._groups, AwakeClock(patience)
        ranks, rank, meeting_place = groups.ranks, groups.ranks[groups.rank], groups.meeting_place()
        try:
            self._store = fresh_prefix(meeting_place, ranks, rank)
            discovery = HostDiscovery(self._store, groups.rank, ranks, self, bound, BLOCK)
            try:
                self._walk(discovery, attempt, bound)
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # the store may be what failed
                    self._tell_why(discovery, error)
                    if not discovery.all_came:
                        discovery.tree.take_back()
                        give_prefix_back(meeting_place, ranks, rank)
                raise
        except GradSyncError:
            raise
        except RuntimeError as error:
            # Who has seen rank 0 looks after it, and sees what became of it.
            if rank != 0 and 0 in ranks and ranks.index(0) not in self.peers:
                raise self._without_a_store(error) from error
            raise
        finally:
            self._store = None

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

    def _walk(self, discovery: HostDiscovery, attempt: Attempt[Any], bound: AwakeClock) -> None:
        """Go through the discovery, with pauses that begin anew when it waits for something else."""
        before, pause = None, attempt.pauses(bound.look)
        for awaited in discovery.steps():
            self.absent = discovery.absent
            if (now := (awaited.kind, bool(awaited.ranks))) != before:
                before, pause = now, attempt.pauses(bound.look)
            pause()
        assert discovery.map is not None
        self.absent, self.hosts = [], discovery.map.hosts

    def _tell_why(self, discovery: HostDiscovery, error: BaseException) -> None:
        """Say because of whom this rank gives up: on its page, else it would be blamed itself, and to other blocks."""
        groups, state = self._groups, self._own()
        if isinstance(error, PeerFault):
            phase = Phase.LOST_PEER if isinstance(error, PeerLost) else Phase.FAILED
            state = state._replace(phase=phase, culprits=tuple(map(groups.ranks.index, error.ranks)))
            self._heartbeat.at(state.step, phase, -1, state.culprits)
        lost = [rank for rank in state.culprits if 0 <= rank < groups.size] if state.phase == Phase.LOST_PEER else []
        if discovery.tell_lost(lost) and groups.ranks[groups.rank] == 0:
            bound = AwakeClock(_FAREWELL_S)  # the store ends with this process
            while not bound.over() and not discovery.all_know(lost):
                time.sleep(0.02)

    # What the discovery asks: see `Sight`

    def state(self) -> bytes:
        return encode(self._own())

    def record(self) -> bytes:
        host, kernel = (sha256(identity().encode()).digest() for identity in (host_identity, kernel_identity))
        return _RECORD.pack(host, kernel, os.getpid(), self._heartbeat.fd, self._heartbeat.nonce)

    def look(self, records: dict[int, bytes]) -> tuple[set[int], list[int]]:
        _, my_kernel, *_ = _RECORD.unpack(self.record())
        found: dict[int, Peer] = {}
        gone: list[int] = []
        for rank, record in records.items():
            _, kernel, pid, fd, nonce = _RECORD.unpack(record)
            local = LocalPeer.find(pid, fd, nonce)
            if local is not None:
                found[rank] = local
                remember(self._groups.ranks[rank], pid)
            elif kernel == my_kernel and is_gone(pid):
                gone.append(rank)
        self.peers = dict(sorted({**self.peers, **found}.items()))
        return set(found), gone

    def have_ended(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if ended(self._groups.ranks[rank])]

    def hear(self, ranks: Sequence[int]) -> None:
        if self.remote_states is None:
            assert self._store is not None
            store = PrefixStore(BEATS, self._store)
            self.remote_states = RemoteStates(store, self._groups.rank, ranks, self._own)
        else:
            self.remote_states.hear(ranks)
        heard = {rank: RemotePeer(self.remote_states, rank) for rank in ranks}
        self.peers = dict(sorted({**self.peers, **heard}.items()))

    def _without_a_store(self, error: RuntimeError) -> PeerLost:
        groups = self._groups
        where = place(groups.ranks[groups.rank], groups.size)
        reason = str(error).strip().split("\n")[0]
        return PeerLost(
            f"{where} the store in which the ranks meet was lost in attach ({reason}); rank 0 keeps it, or the "
            "launcher: see whether that ended",
            [0],
        )
