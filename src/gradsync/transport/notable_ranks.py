"""A host's summary of many ranks in few bytes: the most notable ones as they are, and how many it speaks of.

    first    who died or fell silent
    then     who gave up because of others, who failed, who left
    then     who is furthest behind, and among equals who does not wait

A wait needs no more: it asks who is gone, who stopped and why, who is late. Up to `MOST` ranks all are in it. Pure.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable
from typing import NamedTuple

from gradsync.transport.heartbeat import Phase, RankState

MOST = 32  # ranks in a summary
MAX_NAMED = 8  # culprits that travel with a rank
_HEAD = struct.Struct("<ii")  # ranks listed, ranks spoken of
_RANK = struct.Struct(f"<iqiBBHff{MAX_NAMED}i")  # … culprits: how many, seconds held, seconds unheard of, who
SUMMARY_NBYTES = _HEAD.size + MOST * _RANK.size
_DEAD, _SILENT = 1, 2
_ORDER = {Phase.LOST_PEER: 1, Phase.FAILED: 2, Phase.LEFT: 3}
_GONE, _AT_WORK = 0, 4


class NotableRank(NamedTuple):
    """One rank as somebody saw it."""

    rank: int  # index in the group
    state: RankState
    dead: bool = False
    silent: bool = False
    held_s: float = 0.0  # how long its interpreter was not heard of though its process runs
    unheard_s: float = 0.0  # how long nothing was heard of it, for a reason that need not lie with it

    @property
    def alarm(self) -> tuple[int, Phase, bool] | None:
        """The news that all should hear at once, if there is any."""
        gone = self.dead or self.silent
        return (self.rank, self.state.phase, gone) if gone or self.state.phase >= Phase.FAILED else None


class HostSummary(NamedTuple):
    """A host's summary of the ranks it speaks for; the first one is the speaker itself."""

    notable: tuple[NotableRank, ...]
    num_ranks: int

    @property
    def alarms(self) -> tuple[tuple[int, Phase, bool], ...]:
        """The news for others, in the order of the list."""
        return tuple(alarm for each in self.notable if (alarm := each.alarm) is not None)


def _notability(each: NotableRank) -> tuple[int, int, bool, int]:
    state = each.state
    kind = _ORDER.get(state.phase, _GONE if each.dead or each.silent else _AT_WORK)
    return kind, state.step, state.phase == Phase.WAITING, each.rank


def most_notable(ranks: Iterable[NotableRank], most: int = MOST) -> list[NotableRank]:
    """Return those that a summary has room for, the most notable first.

    >>> states = [RankState(0, step, Phase.BACKWARD, -1, ()) for step in [9, 8, 9]]
    >>> early, late, dead = (NotableRank(rank, state) for rank, state in enumerate(states))
    >>> [each.rank for each in most_notable([early, late, dead._replace(dead=True)], 2)]
    [2, 1]
    """
    return heapq.nsmallest(most, ranks, key=_notability)


def encode_summary(summary: HostSummary) -> bytes:
    """A text of fixed length; whoever sends it adds a checksum."""
    records = [_HEAD.pack(len(summary.notable), summary.num_ranks)]
    for rank, state, dead, silent, held_s, unheard_s in summary.notable:
        culprits = state.culprits[:MAX_NAMED]
        padded = culprits + (0,) * (MAX_NAMED - len(culprits))
        flags = _DEAD * dead | _SILENT * silent
        fields = rank, state.step, state.bucket, state.phase, flags, len(culprits), held_s, unheard_s
        records.append(_RANK.pack(*fields, *padded))
    return b"".join(records).ljust(SUMMARY_NBYTES, b"\0")


def decode_summary(text: bytes, size: int) -> HostSummary | None:
    """Return what was said of a group of `size` ranks, or None for anything that is no summary."""
    if len(text) != SUMMARY_NBYTES:
        return None
    count, num_ranks = _HEAD.unpack_from(text)
    if not 0 < count <= MOST or not count <= num_ranks <= size:
        return None
    notable = []
    for rank, step, bucket, phase, flags, named, held_s, unheard_s, *culprits in _RANK.iter_unpack(
        text[_HEAD.size : _HEAD.size + count * _RANK.size]
    ):
        if not 0 <= rank < size or phase not in _PHASES or named > MAX_NAMED:
            return None
        state = RankState(0, step, _PHASES[phase], bucket, tuple(culprits[:named]))
        notable.append(NotableRank(rank, state, bool(flags & _DEAD), bool(flags & _SILENT), held_s, unheard_s))
    return HostSummary(tuple(notable), num_ranks)


_PHASES = {int(phase): phase for phase in Phase}
