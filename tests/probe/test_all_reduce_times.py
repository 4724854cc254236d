"""Sizes rise until the rate is what a link keeps up, whatever it lets through at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.probe.all_reduce_times import sweep
from gradsync.probe.fit import TimedMessage, fit, ring_message
from gradsync.probe.probe_group import open_probe_group

Run = Callable[..., list[Any]]

RATE, LATENCY_S = 1e9, 50e-6


class BurstingLink:
    """All-reduces of two ranks over a link that lets so many bytes through at once, by its formula."""

    what = "the measurement of a formula"
    teams = ((0, 1),)
    most_nbytes = 64 << 20

    def __init__(self, burst: float) -> None:
        self._burst = burst
        self.sizes: list[int] = []

    def calls_of(self, nbytes: int) -> int:
        return 1

    def run(self, nbytes: int, times: int) -> list[float]:
        self.sizes.append(nbytes)
        return [2 * LATENCY_S + max(0.0, nbytes - self._burst) / RATE] * times

    def run_beside(self, nbytes: int, times: int, issue: Callable[[], None]) -> float:
        raise NotImplementedError


def found_behind(burst: float) -> tuple[float, int]:
    """The rate that a brief sweep finds, and the largest size that it took."""
    link = BurstingLink(burst)
    world = dist.group.WORLD
    assert world is not None
    with open_probe_group(world, brief=True) as group:
        timed = sweep(group, link)
    messages = [TimedMessage(*ring_message(each.nbytes, each.seconds, 2), each.checks) for each in timed]
    return fit(messages).link.bandwidth, max(link.sizes)


@pytest.mark.parametrize("burst", [128 << 10, 1 << 20])
def test_a_burst_is_not_taken_for_the_rate(run: Run, burst: int) -> None:
    (rate, _), _ = run(found_behind, burst)
    assert rate == pytest.approx(RATE, rel=0.05)


def test_a_link_without_bursts_is_not_sent_more_than_planned(run: Run) -> None:
    (rate, largest), _ = run(found_behind, 0)
    assert (rate, largest) == (pytest.approx(RATE), 4 << 20)
