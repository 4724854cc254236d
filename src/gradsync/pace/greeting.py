"""A word between neighbours, before anything large travels: what each is in, which round, how much it brings.

Messages between two ranks have no header that all ranks see. Without a word first, one that is in an exchange would
wait for one that is in `drain()`, and both forever.

Note [Neighbours first]
    A header among all ranks would tell too, but gossip would then wait for the slowest of all in every exchange. So a
    rank tells only its neighbours of the round, both of them: who gives to it, and who gets from it. And it does so
    not only before an exchange, but before everything that all ranks do together, `detach()` for one: a neighbour that
    waits in an exchange hears that we are elsewhere. Both then raise, and the others see that they have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.errors import Disagreement, NonFinite, listed
from gradsync.guard.calls import check_same_call
from gradsync.guard.header import HEAD_NBYTES, Head, Headers, pack_header
from gradsync.transport.groups import Channel
from gradsync.transport.lane import Lane

GREETING_TAG = 0


def greet(lane: Lane, channel: Channel, peers: Sequence[int], mine: Head, names: Sequence[str]) -> dict[int, Head]:
    """Tell these members of the group where we are, and return where they are: in the same, or this raises.

    `names` are the parameters', for a head that tells of a NaN in one of them.
    """
    row = pack_header(mine, bytearray())
    rows = {peer: torch.empty(HEAD_NBYTES, dtype=torch.uint8, device="cpu") for peer in peers}

    def run() -> None:
        works = [channel.recv(rows[peer], peer, GREETING_TAG) for peer in peers]
        works += [channel.send(row, peer, GREETING_TAG) for peer in peers]
        for work in works:
            work.wait()

    lane.wait(lane.send(run, "the word of its neighbours", HEAD_NBYTES * len(peers)))
    members = sorted([lane.groups.rank, *peers])  # all of them look in one order, and say the same
    rows[lane.groups.rank] = row
    headers = Headers(torch.stack([rows[member] for member in members]))
    ranks = tuple(lane.global_ranks(members))
    check_same_call(headers, ranks)
    _check_round(headers, ranks, lane)
    _check_finite(headers, ranks, names, lane)
    return dict(zip(members, headers.heads, strict=True))


def _check_round(headers: Headers, ranks: tuple[int, ...], lane: Lane) -> None:
    first = headers.heads[0].step
    for rank, head in zip(ranks, headers.heads, strict=True):
        if head.step != first:
            raise Disagreement(
                f"{lane.place()} rank {rank} is in round {head.step} of gossip and its neighbour, rank {ranks[0]}, in "
                f"{first}: they did not call backward equally often, or resumed from different checkpoints"
            )


def _check_finite(headers: Headers, ranks: tuple[int, ...], names: Sequence[str], lane: Lane) -> None:
    bad = [(rank, head.nonfinite) for rank, head in zip(ranks, headers.heads, strict=True) if head.nonfinite >= 0]
    if bad:
        lane.fail()  # the others are not told by a header
        raise NonFinite(
            f"{lane.place()} {listed([rank for rank, _ in bad])} would have sent NaN or Inf in {names[bad[0][1]]}; no "
            "neighbour has taken it: go back to the last checkpoint"
        )
