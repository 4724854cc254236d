"""A schedule's price is the closed formula of the textbook, where there is one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playback import RECIPES, host_lists

from gradsync.algorithms.halving_doubling import halving_doubling
from gradsync.algorithms.hierarchical import hierarchical
from gradsync.algorithms.price import price
from gradsync.algorithms.ring import ring
from gradsync.algorithms.schedule import Recipe, Schedule, Transfer
from gradsync.algorithms.tree import tree
from gradsync.cluster import Cluster, Link, as_hosts

# alpha: seconds per message; beta: per byte; gamma: per byte added; S: bytes; h: height of a tree; n: ranks.
S = 25e6
NVLINK, ETHERNET = Link(3e-6, 2e11), Link(50e-6, 1.25e9)
GAMMA = 3e-11

counts = pytest.mark.parametrize("n", [*range(1, 18), 31, 32, 33, 63, 64])


def flat(n: int, alpha: float = 50e-6, beta: float = 8e-9, gamma: float = GAMMA) -> Cluster:
    link = Link(alpha, 1 / beta)
    return Cluster(as_hosts(n), link, link, reduce_s_per_byte=gamma)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 64),
    alpha=st.floats(0, 1),
    beta=st.floats(1e-12, 1e-3),
    gamma=st.floats(0, 1e-3),
    nbytes=st.integers(0, 10**12),
)
def test_ring(n: int, alpha: float, beta: float, gamma: float, nbytes: int) -> None:
    expected = 2 * (n - 1) * alpha + 2 * (n - 1) / n * nbytes * beta + (n - 1) / n * nbytes * gamma
    assert price(ring().schedule(n), nbytes, flat(n, alpha, beta, gamma)) == pytest.approx(expected, rel=1e-9)


@counts
def test_halving_doubling_with_the_cost_of_its_fold(n: int) -> None:
    cluster = flat(n)
    alpha, beta = cluster.inside.latency_s, 1 / cluster.inside.bandwidth
    p = 2 ** int(math.log2(n))
    expected = 2 * math.log2(p) * alpha + 2 * (p - 1) / p * S * beta + (p - 1) / p * S * GAMMA
    if n != p:
        expected += 2 * alpha + 2 * S * beta + S * GAMMA
    assert price(halving_doubling().schedule(n), S, cluster) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("n", [*range(3, 18), 31, 32, 33, 63, 64])
def test_tree(n: int, k: int) -> None:
    cluster = flat(n)
    alpha, beta = cluster.inside.latency_s, 1 / cluster.inside.bandwidth
    h, p = int(math.log2(n)), int(n & (n - 1) == 0)
    steps = h + k - 1
    expected = 2 * steps * alpha + (2 * steps - p) / k * S * beta + (steps - p / 2) / k * S * GAMMA
    assert price(tree(k).schedule(n), S, cluster) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_tree_of_two_ranks(k: int) -> None:
    cluster = flat(2)
    alpha, beta = cluster.inside.latency_s, 1 / cluster.inside.bandwidth
    expected = 2 * k * alpha + S * beta + S * GAMMA / 2
    assert price(tree(k).schedule(2), S, cluster) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [6, 16, 33])
def test_the_best_pipeline_of_a_tree_is_where_its_formula_says(n: int) -> None:
    cluster = flat(n)
    beta, h = 1 / cluster.inside.bandwidth, int(math.log2(n))
    best = round(math.sqrt((h - 1) * S * (beta + GAMMA / 2) / cluster.inside.latency_s))
    seconds = {k: price(tree(k).schedule(n), S, cluster) for k in (best // 2, best, 2 * best)}
    assert min(seconds, key=lambda k: seconds[k]) == best


@pytest.mark.parametrize("g", [1, 2, 3, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 7])
def test_hierarchical_with_one_nic_per_host(m: int, g: int) -> None:
    n = m * g
    cluster = Cluster(grid(m, g), NVLINK, ETHERNET, reduce_s_per_byte=GAMMA)
    inside = 2 * (g - 1) * NVLINK.latency_s + 2 * (g - 1) / g * S / NVLINK.bandwidth
    across = 2 * (m - 1) * ETHERNET.latency_s + 2 * (m - 1) / m * S / ETHERNET.bandwidth
    expected = inside + across + (n - 1) / n * S * GAMMA
    assert price(hierarchical().schedule(cluster.hosts), S, cluster) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("m", "g"), [(2, 2), (3, 8), (7, 3)])
def test_hierarchical_with_a_nic_per_rank_divides_what_crosses_by_the_ranks(m: int, g: int) -> None:
    cluster = Cluster(grid(m, g), NVLINK, ETHERNET, shared_nic=False)
    inside = 2 * (g - 1) * NVLINK.latency_s + 2 * (g - 1) / g * S / NVLINK.bandwidth
    across = 2 * (m - 1) * ETHERNET.latency_s + 2 * (m - 1) / m * S / g / ETHERNET.bandwidth
    assert price(hierarchical().schedule(cluster.hosts), S, cluster) == pytest.approx(inside + across, rel=1e-9)


@pytest.mark.parametrize(("m", "g", "ratio"), [(2, 8, 1.875), (4, 8, 1.29), (8, 8, 1.125), (2, 2, 1.5)])
def test_on_one_slow_nic_hierarchical_beats_a_flat_ring_by_the_bytes_it_saves(m: int, g: int, ratio: float) -> None:
    cluster = Cluster(grid(m, g), Link(0, 1e15), Link(0, 1e8))
    flat_s, hierarchical_s = (price(r.schedule(cluster.hosts), S, cluster) for r in (ring(), hierarchical()))
    assert flat_s / hierarchical_s == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("n", [2, 5, 9])
def test_a_star_pays_for_everything_at_its_centre(n: int) -> None:
    gather = tuple(Transfer(rank, 0, 0, add=True) for rank in range(1, n))
    spread = tuple(Transfer(0, rank, 0, add=False) for rank in range(1, n))
    cluster = flat(n)
    alpha, beta = cluster.inside.latency_s, 1 / cluster.inside.bandwidth
    expected = 2 * alpha + 2 * (n - 1) * S * beta + (n - 1) * S * GAMMA
    assert price(Schedule(n, 1, (gather, spread)), S, cluster) == pytest.approx(expected, rel=1e-9)


def test_a_shared_nic_carries_one_stream_after_the_other_and_both_ways_at_once() -> None:
    both_leave = Schedule(4, 1, ((Transfer(0, 2, 0, True), Transfer(1, 3, 0, True)),))
    there_and_back = Schedule(4, 1, ((Transfer(0, 2, 0, True), Transfer(3, 1, 0, True)),))
    shared, own = (Cluster(grid(2, 2), NVLINK, ETHERNET, shared_nic=shared) for shared in (True, False))
    one_s = ETHERNET.latency_s + S / ETHERNET.bandwidth
    assert price(both_leave, S, shared) == pytest.approx(one_s + S / ETHERNET.bandwidth)
    assert price(both_leave, S, own) == pytest.approx(one_s)
    assert price(there_and_back, S, shared) == pytest.approx(one_s)


@settings(max_examples=25, deadline=None)
@given(recipe=st.sampled_from(RECIPES), hosts=host_lists(max_ranks=24))
def test_no_price_is_below_the_bounds_of_any_all_reduce(recipe: Recipe, hosts: list[list[int]]) -> None:
    n = sum(map(len, hosts))
    cluster = Cluster(as_hosts(hosts), ETHERNET, ETHERNET, shared_nic=False, reduce_s_per_byte=GAMMA)
    seconds = price(recipe.schedule(hosts), S, cluster)
    least = math.ceil(math.log2(n)) * ETHERNET.latency_s + 2 * (n - 1) / n * S / ETHERNET.bandwidth
    assert seconds >= (least + (n - 1) / n * S * GAMMA) * (1 - 1e-9)


def test_a_schedule_for_other_ranks_than_the_cluster_has_is_refused() -> None:
    with pytest.raises(ValueError, match="the schedule is for 4 ranks, the cluster has 5; make it with"):
        price(ring().schedule(4), S, flat(5))


@pytest.mark.parametrize("nbytes", [-1, math.nan, math.inf])
def test_bytes_that_are_none_are_refused(nbytes: Any) -> None:
    with pytest.raises(ValueError, match="nbytes must be a number of bytes, 0 or more"):
        price(ring().schedule(4), nbytes, flat(4))


def grid(m: int, g: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(host * g, (host + 1) * g)) for host in range(m))
