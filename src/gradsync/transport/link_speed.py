"""A quick measurement of a link between two ranks, to choose an algorithm by, or to find a slow link."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from statistics import median

import torch

from gradsync.cluster import Link
from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane

_PINGS = 7
_LOADS = 3  # the first one empties whatever lets a burst through at full speed, a cloud's token bucket say
LOAD_NBYTES = 1 << 20
_TAG = (1 << 31) - 1  # no round of any bucket: those count from 0
_FIGURES = struct.Struct("<dd")


def measure_across(lane: Lane) -> Link:
    """The link between the first ranks of the first two hosts; every rank of the group calls this, all get the same."""
    return measure_pairs(lane, [(lane.hosts[0][0], lane.hosts[1][0])])[0]


def measure_pairs(lane: Lane, pairs: Sequence[tuple[int, int]]) -> list[Link]:
    """The links from the first to the second of each pair, all at once; every rank of the group calls this likewise.

    No rank may be in two pairs. Seven pings and three loads of 1 MB: some 30 ms at 1 Gbit/s.
    """
    figures = [(0.0, 0.0)]

    def talk() -> None:
        channel, me = lane.groups.gloo(MESSAGES), lane.groups.rank
        for first, second in pairs:
            if me == first:
                figures[0] = _ask(channel, second)
            elif me == second:
                _answer(channel, first)

    lane.wait(lane.send(talk, "the measurement of the link between hosts", 0))
    rows = [_FIGURES.unpack(row) for row in lane.exchange(_FIGURES.pack(*figures[0]))]
    return [Link(*rows[first]) for first, _ in pairs]


def _ask(channel: GlooChannel, peer: int) -> tuple[float, float]:
    """Latency and bandwidth: half of a ping's way there and back, and what a load takes longer than that."""
    ping, load = (
        torch.zeros(1, dtype=torch.uint8, device="cpu"),
        torch.zeros(LOAD_NBYTES, dtype=torch.uint8, device="cpu"),
    )
    pings = [_there_and_back(channel, peer, ping, ping) for _ in range(_PINGS)]
    latency_s = median(pings) / 2
    loads = [_there_and_back(channel, peer, load, ping) for _ in range(_LOADS)]
    return latency_s, LOAD_NBYTES / max(min(loads[1:]) - 2 * latency_s, 1e-9)


def _there_and_back(channel: GlooChannel, peer: int, out: torch.Tensor, back: torch.Tensor) -> float:
    start = time.perf_counter()
    channel.send(out, peer, _TAG).wait()
    channel.recv(back, peer, _TAG).wait()
    return time.perf_counter() - start


def _answer(channel: GlooChannel, peer: int) -> None:
    ping, load = (
        torch.zeros(1, dtype=torch.uint8, device="cpu"),
        torch.zeros(LOAD_NBYTES, dtype=torch.uint8, device="cpu"),
    )
    for message in [ping] * _PINGS + [load] * _LOADS:
        channel.recv(message, peer, _TAG).wait()
        channel.send(ping, peer, _TAG).wait()
