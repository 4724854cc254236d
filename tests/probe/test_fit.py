"""A link is found again in what its messages took; noise becomes spread, not curve."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.algorithms.builtin import SharedMemory
from gradsync.algorithms.price import cost, price
from gradsync.algorithms.ring import ring
from gradsync.cluster import Cluster, Link, as_hosts
from gradsync.probe.fit import TimedMessage, fit, memory_message, ring_message

SIZES = [32.0, *(512.0 * 4**power for power in range(8))]
CHECKS = [16384.0, 262144.0, 1048576.0]

latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e5, 1e11)
many = settings(max_examples=200, deadline=None)


@many
@given(latencies, bandwidths)
def test_a_link_is_found_again_in_exact_times(latency_s: float, bandwidth: float) -> None:
    wire = Link(latency_s, bandwidth)
    found = fit([TimedMessage(nbytes, wire.seconds(nbytes), nbytes in CHECKS) for nbytes in sorted({*SIZES, *CHECKS})])
    assert found.link.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-12)
    assert found.worst_error < 1e-6
    assert found.link.spread < 1e-6
    assert found.link.seconds(1e9) == pytest.approx(wire.seconds(1e9), rel=0.02)


@many
@given(latencies, st.lists(bandwidths, min_size=len(SIZES), max_size=len(SIZES)))
def test_whatever_was_measured_the_largest_message_takes_what_it_took(latency_s: float, rates: list[float]) -> None:
    times = [latency_s + nbytes / rate for nbytes, rate in zip(SIZES, rates, strict=True)]
    found = fit([TimedMessage(nbytes, seconds) for nbytes, seconds in zip(SIZES, times, strict=True)])
    assert found.link.seconds(SIZES[-1]) == pytest.approx(times[-1], rel=1e-3)
    assert 0 <= found.link.latency_s <= min(times)


@given(st.integers(0, 1000), st.floats(0.02, 0.2))
def test_noise_becomes_spread(seed: int, noise: float) -> None:
    chance, wire = random.Random(seed), Link(200e-6, 12e6)
    samples = [
        TimedMessage(nbytes, wire.seconds(nbytes) * max(0.2, chance.gauss(1, noise)))
        for nbytes in SIZES
        for _ in range(41)
    ]
    link = fit(samples).link
    assert link.spread == pytest.approx(noise, rel=0.4)
    assert link.bandwidth == pytest.approx(wire.bandwidth, rel=noise)


def test_one_disturbed_message_changes_little() -> None:
    wire = Link(100e-6, 1e8)
    clean = [TimedMessage(nbytes, wire.seconds(nbytes)) for nbytes in SIZES for _ in range(5)]
    found = fit([*clean, *(TimedMessage(nbytes, 1.0) for nbytes in SIZES)])
    assert found.link == fit(clean).link


def test_a_small_message_that_took_longer_than_a_large_one_was_disturbed() -> None:
    wire = Link(100e-6, 1e8)
    times = {nbytes: wire.seconds(nbytes) for nbytes in SIZES}
    times[SIZES[0]] = 1.0
    link = fit([TimedMessage(nbytes, seconds) for nbytes, seconds in times.items()]).link
    assert link.latency_s == pytest.approx(wire.latency_s, rel=0.1)


def test_one_size_is_not_enough() -> None:
    with pytest.raises(ValueError, match=r"at least 2 sizes, got \[64\]"):
        fit([TimedMessage(64, 1e-3), TimedMessage(128, 1e-3, checks=True)])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_probe_and_planner_mean_the_same_ring(ranks: int) -> None:
    wire = Link(50e-6, 1e8, curve=((1e4, 5e7), (1e6, 1e8)))
    cluster = Cluster(as_hosts(ranks), inside=wire, across=wire)
    for nbytes in (1e3, 1e5, 1e7):
        message, seconds = ring_message(nbytes, price(ring().schedule(ranks), nbytes, cluster), ranks)
        assert seconds == pytest.approx(wire.seconds(message))


def test_probe_and_planner_mean_the_same_memory() -> None:
    memory = Link(5e-6, 1e10)
    cluster = Cluster(as_hosts(2), inside=Link(1.0, 1.0), across=Link(1.0, 1.0))
    message, seconds = memory_message(4e6, cost(SharedMemory(), 4_000_000, cluster, memory))
    assert seconds == pytest.approx(memory.seconds(message))
