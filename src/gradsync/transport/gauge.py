"""What the link between two hosts can do, measured in a moment: for choosing an algorithm when nobody chose one."""

from __future__ import annotations

import struct
import time
from statistics import median

import torch

from gradsync.links import Link
from gradsync.transport.groups import MESSAGES, Channel
from gradsync.transport.lane import Lane

_PINGS = 7
_LOADS = 3  # the first one empties whatever lets a burst through at full speed, a cloud's token bucket say
_LOAD_NBYTES = 1 << 20
_TAG = (1 << 31) - 1  # no round of any bucket: those count from 0
_FIGURES = struct.Struct("<dd")


def measure_across(lane: Lane) -> Link:
    """The link between the first ranks of the first two hosts; every rank of the group calls this, all get the same.

    Seven pings and three loads of 1 MB: some 30 ms at 1 Gbit/s.
    """
    first, second = lane.hosts[0][0], lane.hosts[1][0]
    figures = [(0.0, 0.0)]

    def talk() -> None:
        channel = lane.groups.data[MESSAGES]
        if lane.groups.rank == first:
            figures[0] = _ask(channel, second)
        elif lane.groups.rank == second:
            _answer(channel, first)

    lane.wait(lane.send(talk, "the measurement of the link between hosts", 0))
    latency_s, bandwidth = _FIGURES.unpack(lane.exchange(_FIGURES.pack(*figures[0]))[first])
    return Link(latency_s, bandwidth)


def _ask(channel: Channel, peer: int) -> tuple[float, float]:
    """Latency and bandwidth: half of a ping's way there and back, and what a load takes longer than that."""
    ping, load = torch.zeros(1, dtype=torch.uint8), torch.zeros(_LOAD_NBYTES, dtype=torch.uint8)
    pings = [_there_and_back(channel, peer, ping, ping) for _ in range(_PINGS)]
    latency_s = median(pings) / 2
    loads = [_there_and_back(channel, peer, load, ping) for _ in range(_LOADS)]
    return latency_s, _LOAD_NBYTES / max(min(loads[1:]) - 2 * latency_s, 1e-9)


def _there_and_back(channel: Channel, peer: int, out: torch.Tensor, back: torch.Tensor) -> float:
    start = time.perf_counter()
    channel.send(out, peer, _TAG).wait()
    channel.recv(back, peer, _TAG).wait()
    return time.perf_counter() - start


def _answer(channel: Channel, peer: int) -> None:
    ping, load = torch.zeros(1, dtype=torch.uint8), torch.zeros(_LOAD_NBYTES, dtype=torch.uint8)
    for message in [ping] * _PINGS + [load] * _LOADS:
        channel.recv(message, peer, _TAG).wait()
        channel.send(ping, peer, _TAG).wait()
