"""The offset of a host's clock from rank 0's, by messages to and fro.

    rank 0    ──t0─────────────r0──      what is sent before another receives it bounds the difference from both sides:
    rank 1    ────────t1────r1─────      t0 < r1 and t1 < r0, each by at least the time of travel

Every rank sends its time to all, several times in a row, and then when it had everybody's. Of all rounds the tightest
bounds count; the middle between them is the estimate, half their distance its error. One host has one clock.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gradsync.transport.lane import Lane

_ROUNDS = 8
_TIMES = struct.Struct("<dd")


class ClockOffset(NamedTuple):
    """Add `offset_s` to our clock to get rank 0's."""

    offset_s: float
    error_s: float


def measure_offset(lane: Lane) -> ClockOffset:
    """Measure this rank's offset; every rank of the group calls this at once."""
    if len(lane.hosts) == 1:
        return ClockOffset(0.0, 0.0)
    rounds = []
    received = 0.0
    for _ in range(_ROUNDS + 1):
        sent = time.perf_counter()
        rows = lane.exchange(_TIMES.pack(sent, received), "the comparison of clocks")
        received = time.perf_counter()
        rounds.append([_TIMES.unpack(row) for row in rows])
    if any(lane.groups.rank in host and 0 in host for host in lane.hosts):
        return ClockOffset(0.0, 0.0)
    return estimate(rounds, lane.groups.rank)


def estimate(rounds: Sequence[Sequence[tuple[float, float]]], rank: int) -> ClockOffset:
    """The offset, from what each rank said in each round: when it sent that, and when it had received the one before.

    >>> first, second = [(100.0, 0.0), (5.0, 0.0)], [(100.2, 100.1), (5.2, 5.1)]
    >>> estimate([first, second], 1).offset_s
    95.0
    """
    low, high = float("-inf"), float("inf")
    for this, following in pairwise(rounds):
        (theirs, _), (mine, _) = this[0], this[rank]
        (_, theirs_received), (_, mine_received) = following[0], following[rank]
        low = max(low, theirs - mine_received)  # what rank 0 sent was here later
        high = min(high, theirs_received - mine)
    return ClockOffset(round((low + high) / 2, 9), round(abs(high - low) / 2, 9))
