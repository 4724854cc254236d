"""The choice of an algorithm is the cheapest by price, and follows the links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.algorithms.builtin import Native, SharedMemory
from gradsync.algorithms.hierarchical import Hierarchical
from gradsync.algorithms.price import CANDIDATES, DEFAULT_ACROSS, LOOPBACK, MEMORY, cheapest, cost, price
from gradsync.algorithms.ring import Ring
from gradsync.cluster import Cluster, Hosts, Link

EVERYTHING = (Native(), *CANDIDATES)
TWO_BY_TWO: Hosts = ((0, 1), (2, 3))
SLOW = Link(latency_s=100e-6, bandwidth=125e6)
QUICK = Link(latency_s=20e-6, bandwidth=1e9)

layouts = st.sampled_from([TWO_BY_TWO, ((0,), (1,)), ((0,), (1, 2, 3)), ((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 2), (4,))])
links = st.builds(Link, latency_s=st.floats(0, 1e-2), bandwidth=st.floats(1e6, 1e11))


@settings(max_examples=60, deadline=None)
@given(layout=layouts, inside=links, across=links, nbytes=st.integers(0, 1 << 32))
def test_nothing_is_cheaper_than_the_cheapest(layout: Hosts, inside: Link, across: Link, nbytes: int) -> None:
    cluster = Cluster(layout, inside=inside, across=across)
    chosen = cheapest(nbytes, cluster)
    assert chosen in EVERYTHING
    assert cost(chosen, nbytes, cluster) == min(cost(each, nbytes, cluster) for each in EVERYTHING)


@settings(max_examples=30, deadline=None)
@given(layout=layouts, inside=links, across=links, nbytes=st.integers(0, 1 << 32), more=st.integers(0, 1 << 32))
def test_more_bytes_never_cost_less(layout: Hosts, inside: Link, across: Link, nbytes: int, more: int) -> None:
    cluster = Cluster(layout, inside=inside, across=across)
    for each in (*EVERYTHING, SharedMemory()):
        # Sums of floats: up to their rounding.
        assert cost(each, nbytes, cluster) <= cost(each, nbytes + more, cluster) * (1 + 1e-12)


@settings(max_examples=30, deadline=None)
@given(layout=layouts, inside=links, across=links, nbytes=st.integers(0, 1 << 32))
def test_native_is_a_ring_that_needs_python_once(layout: Hosts, inside: Link, across: Link, nbytes: int) -> None:
    cluster = Cluster(layout, inside=inside, across=across)
    assert cost(Native(), nbytes, cluster) <= cost(Ring(), nbytes, cluster)
    assert cheapest(nbytes, cluster) != Ring()


@pytest.mark.parametrize("across", [SLOW, DEFAULT_ACROSS])
def test_large_tensors_go_by_the_hierarchy_where_ranks_of_a_host_share_memory(across: Link) -> None:
    for megabytes in (1, 25, 100, 1000):
        assert cheapest(megabytes << 20, Cluster(TWO_BY_TWO, LOOPBACK, across), MEMORY) == Hierarchical()


def test_tiny_tensors_are_left_to_the_backend_where_latency_is_less_than_pythons() -> None:
    for nbytes in (0, 1, 64, 1024):
        assert cheapest(nbytes, Cluster(TWO_BY_TWO, inside=QUICK, across=QUICK), MEMORY) == Native()


def test_once_the_hierarchy_pays_it_pays_for_all_that_is_larger() -> None:
    chosen = [cheapest(1 << power, Cluster(TWO_BY_TWO, QUICK, QUICK), MEMORY) for power in range(31)]
    first = chosen.index(Hierarchical())
    assert chosen[first:] == [Hierarchical()] * (31 - first)
    assert chosen[0] == Native()


def test_shared_memory_is_priced_by_memory_alone() -> None:
    shared, loopback = (Cluster(((0, 1, 2, 3),), inside=link, across=SLOW) for link in (MEMORY, LOOPBACK))
    for nbytes in (64, 1 << 20, 1 << 28):
        assert cost(SharedMemory(), nbytes, shared) < cost(Native(), nbytes, loopback)
    assert cost(SharedMemory(), 0, shared) == 2 * MEMORY.latency_s


def test_the_cost_is_the_links_a_bit_of_python_for_each_round_and_the_sending() -> None:
    cluster = Cluster(TWO_BY_TWO, inside=LOOPBACK, across=SLOW)
    for recipe in CANDIDATES:
        schedule = recipe.schedule(TWO_BY_TWO)
        extra = cost(recipe, 1 << 20, cluster) - price(schedule, 1 << 20, cluster)
        most = max(schedule.share_sent_by(rank) for rank in range(4))
        assert extra == pytest.approx(len(schedule.rounds) * 100e-6 + most * (1 << 20) * 0.5e-9)


def test_where_memory_is_shared_the_hierarchy_sends_only_what_crosses() -> None:
    cluster = Cluster(TWO_BY_TWO, inside=MEMORY, across=SLOW)
    with_memory, without = (cost(Hierarchical(), 1 << 20, cluster, memory) for memory in (MEMORY, None))
    assert without - with_memory == pytest.approx((1 << 20) * 0.5e-9)  # a whole copy of the data, to the neighbour
