"""Who is alive, who is silent, and who is to blame; apart from the data, so it works when data is stuck.

Every rank beats four times a second from a thread of its own, which needs the interpreter: a rank that is
stopped, or whose interpreter is held, falls silent. Peers on the same host are seen through their page and
pidfd, others through the store.

    beat   ─┬──┬──┬──┬──✕            rank 2 is stopped
    seen    └──┴──┴──┴───·····10 s·····→ PeerLost naming rank 2, on every other rank

Blame goes to who is dead or silent, never to who reported: a rank that fails writes whom it holds
responsible, and the others take that over instead of blaming the reporter when it exits.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Sequence
from hashlib import sha256

import torch
import torch.distributed as dist

from gradsync.policy import Guard
from gradsync.transport.groups import Groups
from gradsync.transport.hosts import host_identity
from gradsync.transport.page import Page, Phase, State
from gradsync.transport.peers import LocalPeer, Mailbox, Peer, RemotePeer

_TICK_S = 0.25
_REPORT_S = 2.0  # after an error: how long to wait for the others' word before blaming somebody
_RECORD = struct.Struct("<64sqq16s")  # host, pid, fd, nonce


class Liveness:
    """This rank's beat and its view of the others."""

    def __init__(self, groups: Groups, guard: Guard, prefix: str) -> None:
        self._groups = groups
        self._guard = guard
        self._page = Page.create()
        self._state = State(0, 0, Phase.COMPUTING, -1, ())
        self._lock = threading.Lock()
        self._mailbox: Mailbox | None = None
        self._peers = self._meet(prefix)
        now = time.monotonic()
        self._last_beat = {rank: (peer.look().beat, now) for rank, peer in self._peers.items()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gradsync-liveness", daemon=True)
        if self._peers:
            self._thread.start()

    # What this rank says

    def at(self, step: int, phase: Phase, bucket: int = -1, culprits: tuple[int, ...] = ()) -> None:
        """Say where this rank is. Cheap: one write to memory."""
        with self._lock:
            self._state = State(self._state.beat, step, phase, bucket, culprits)
            self._page.write(self._state)

    # What this rank sees

    def watch(self, waiting: bool) -> None:
        """Tell whether somebody waits: remote peers are read only then."""
        if self._mailbox is not None:
            if waiting and not self._mailbox.curious.is_set():
                now = time.monotonic()
                with self._lock:
                    self._last_beat = {r: (beat, now) for r, (beat, _) in self._last_beat.items()}
                self._mailbox.curious.set()
            elif not waiting:
                self._mailbox.curious.clear()

    def states(self) -> dict[int, State]:
        """What every other rank last said of itself."""
        return {rank: peer.look() for rank, peer in self._peers.items()}

    def lost(self) -> list[int]:
        """Ranks that will not come: dead or silent; where such a rank had blamed others, those."""
        now = time.monotonic()
        with self._lock:
            silent = [r for r, (_, at) in self._last_beat.items() if now - at >= self._guard.dead_after]
        gone = [rank for rank, peer in self._peers.items() if peer.dead() or rank in silent]
        return self._blame(gone)

    def is_dead(self, rank: int) -> bool:
        """Whether the rank's process is known to have ended."""
        return rank in self._peers and self._peers[rank].dead()

    def reported(self) -> list[int]:
        """Whom ranks that failed hold responsible."""
        states = self.states().values()
        return sorted({rank for state in states if state.phase == Phase.FAILED for rank in state.culprits})

    def responsible(self) -> list[int]:
        """After the transport failed: wait a moment for the facts, then say whose fault it was."""
        self.watch(True)
        start = time.monotonic()
        before = {rank: state.beat for rank, state in self.states().items()}
        while time.monotonic() - start < _REPORT_S:
            if culprits := self.lost() or self.reported():
                return culprits
            time.sleep(0.02)
        # Nobody is known to be dead: a remote rank that stayed silent all this time is the best guess.
        return [rank for rank, state in self.states().items() if state.beat == before[rank]]

    def pid(self, rank: int) -> int | None:
        """The process of a rank of this host."""
        peer = self._peers.get(rank)
        return peer.pid if isinstance(peer, LocalPeer) else None

    def close(self) -> None:
        self.at(self._state.step, Phase.LEFT)
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._mailbox is not None:
            self._mailbox.close()
        for peer in self._peers.values():
            peer.close()
        self._page.close()

    def _blame(self, gone: Sequence[int]) -> list[int]:
        culprits: set[int] = set()
        for rank in gone:
            state = self._peers[rank].look()
            if state.phase == Phase.FAILED and state.culprits:
                culprits.update(r for r in state.culprits if r != self._groups.rank)
            else:
                culprits.add(rank)
        return sorted(culprits)

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_TICK_S):
            now = time.monotonic()
            with self._lock:
                self._state = self._state._replace(beat=self._state.beat + 1)
                self._page.write(self._state)
                # If it was us who stood still, nobody else can be called silent for it.
                stood_still = now - last > 4 * _TICK_S
                for rank, peer in self._peers.items():
                    beat = peer.look().beat
                    if stood_still or beat != self._last_beat[rank][0]:
                        self._last_beat[rank] = (beat, now)
            last = now

    def _meet(self, prefix: str) -> dict[int, Peer]:
        """Exchange who is where, then find every peer: by its page, or else through the store."""
        mine = _RECORD.pack(_digest(host_identity()), os.getpid(), self._page.fd, self._page.nonce)
        records = torch.zeros(self._groups.size, _RECORD.size, dtype=torch.uint8)
        row = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        dist.all_gather(list(records), row, group=self._groups.control)
        peers: dict[int, Peer] = {}
        remote = []
        for rank in range(self._groups.size):
            host, pid, fd, nonce = _RECORD.unpack(bytes(records[rank].tolist()))
            if rank == self._groups.rank:
                continue
            local = LocalPeer.find(pid, fd, nonce) if host == _digest(host_identity()) else None
            if local is None:
                remote.append(rank)
            else:
                peers[rank] = local
        if remote:
            store = dist.distributed_c10d._get_default_store()
            self._mailbox = Mailbox(store, f"gradsync/{prefix}", self._groups.rank, remote, self._page)
            peers |= {rank: RemotePeer(self._mailbox, rank) for rank in remote}
        # Nobody closes or leaves before everybody has opened.
        dist.barrier(group=self._groups.control)
        return dict(sorted(peers.items()))


def _digest(text: str) -> bytes:
    return sha256(text.encode()).hexdigest().encode()
