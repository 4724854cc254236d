"""How the ranks of a group find each other: by page where they share a host, else through the store."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync.errors import PeerLost, place
from gradsync.links import Hosts
from gradsync.transport.groups import Groups
from gradsync.transport.hosts import host_identity
from gradsync.transport.mailbox import Mailbox, RemotePeer
from gradsync.transport.page import Page, State
from gradsync.transport.peers import LocalPeer, Peer

_POLL_S = 1e-3
_CARD = struct.Struct("<32sqq16s")  # host, pid, fd, nonce


class Meeting(NamedTuple):
    """Whom we met, the mailbox if anybody is out of sight, and who shares a host."""

    peers: dict[int, Peer]  # by index in the group
    mailbox: Mailbox | None
    hosts: Hosts


def meet(groups: Groups, page: Page, own: Callable[[], State]) -> Meeting:
    """Exchange cards, then find every peer; all members of the group call this."""
    host = sha256(host_identity().encode()).digest()
    cards = [_CARD.unpack(card) for card in _exchange(groups, _CARD.pack(host, os.getpid(), page.fd, page.nonce))]
    peers: dict[int, Peer] = {}
    for rank, (their_host, pid, fd, nonce) in enumerate(cards):
        local = LocalPeer.find(pid, fd, nonce) if rank != groups.rank and their_host == host else None
        if local is not None:
            peers[rank] = local
    # Sight may be one-sided: who is out of sight for anybody must write to the store. This exchange also
    # keeps every page open until everybody has looked.
    in_sight = _exchange(groups, bytes(rank in peers or rank == groups.rank for rank in range(groups.size)))
    remote = [rank for rank in range(groups.size) if not in_sight[groups.rank][rank]]
    mailbox = None
    if remote or not all(row[groups.rank] for row in in_sight):
        store = groups.store or dist.distributed_c10d._get_default_store()
        # The first member's nonce names this meeting: equal on all its ranks, and never used before.
        mailbox = Mailbox(store, f"gradsync/{cards[0][3].hex()}", groups.rank, remote, own)
        peers |= {rank: RemotePeer(mailbox, rank) for rank in remote}
    if not all(all(row) for row in in_sight):
        _exchange(groups, b"\x01")  # nobody reads the store before everybody has written
    return Meeting(dict(sorted(peers.items())), mailbox, _hosts([card[0] for card in cards], in_sight))


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


def _exchange(groups: Groups, mine: bytes) -> list[bytes]:
    """Every rank's bytes, all equally long."""
    row = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    rows = torch.empty(groups.size, len(mine), dtype=torch.uint8, device="cpu")
    try:
        work = groups.control.gather(rows, row)
        while not work.is_completed():  # a wait in the backend would not hear Ctrl-C
            time.sleep(_POLL_S)
        work.wait()
    except RuntimeError as error:
        where = place(groups.ranks[groups.rank], groups.size)
        raise PeerLost(
            f"{where} a rank died or did not come to attach, or to this group; look at the other ranks' logs", []
        ) from error
    return [bytes(each.numpy()) for each in rows]
