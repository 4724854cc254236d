"""What a lab's link really does, measured over its medium: gloo's send and receive between two hosts."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.cluster import Link
from netlab.lab import Lab

_PINGS, _WARM_UP = 210, 10
_NBYTES = 32 * 2**20


def measure_link(lab: Lab, messages: int = 3, timeout: float = 300) -> Link:
    """Latency and bandwidth between hosts 0 and 1: half a ping-pong of 1 byte, and messages of 32 MB; medians.

    A message of b bytes takes `latency_s + b / bandwidth`, so this is what `gradsync.algorithms` prices with.
    """
    return as_link(*sample_link(lab, messages, timeout))


def sample_link(lab: Lab, messages: int, timeout: float = 300) -> tuple[list[float], list[float]]:
    """Seconds of every ping-pong, and of every large message with its answer of 1 byte."""
    ranks = [1, 1] + [0] * (lab.hosts - 2)
    trips, transfers = lab.spawn(exchange, ranks, messages, timeout=timeout)[0]
    return trips, transfers


def as_link(trips: list[float], transfers: list[float]) -> Link:
    """The price that these samples mean."""
    latency_s = median(trips) / 2
    return Link(latency_s, _NBYTES / (median(transfers) - 2 * latency_s))


def exchange(messages: int) -> tuple[list[float], list[float]]:
    """One rank of two."""
    gs.init(timeout=60)
    answer = torch.zeros(1, dtype=torch.uint8)
    ball, bulk = torch.zeros(1, dtype=torch.uint8), torch.zeros(_NBYTES, dtype=torch.uint8)
    trips = [_there_and_back(ball, answer) for _ in range(_PINGS)]
    transfers = [_there_and_back(bulk, answer) for _ in range(messages)]
    dist.destroy_process_group()
    return trips[_WARM_UP:], transfers


def _there_and_back(message: torch.Tensor, answer: torch.Tensor) -> float:
    start = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(message, 1)
        dist.recv(answer, 1)
    else:
        dist.recv(message, 0)
        dist.send(answer, 0)
    return time.perf_counter() - start
