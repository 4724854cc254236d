"""Closed forms say what walking through the schedule says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.algorithms.builtin import Native, SharedMemory
from gradsync.algorithms.halving_doubling import HalvingDoubling
from gradsync.algorithms.hierarchical import Hierarchical
from gradsync.algorithms.price import price
from gradsync.algorithms.ring import Ring
from gradsync.algorithms.tree import Tree
from gradsync.cluster import Cluster, Device, Link
from gradsync.planner.collective import Collectives

CURVE = ((1e3, 20e6), (1e5, 50e6), (1e6, 110e6))
INSIDE, ACROSS = Link(5e-6, 5e9, curve=((1e3, 1e8), (1e6, 5e9))), Link(60e-6, 110e6, curve=CURVE)


def cluster_of(num_hosts: int, per_host: int, shared_nic: bool = True, **settings: object) -> Cluster:
    hosts = tuple(tuple(range(h * per_host, (h + 1) * per_host)) for h in range(num_hosts))
    return Cluster(hosts, INSIDE, ACROSS, shared_nic, 1e-10, **settings)  # type: ignore[arg-type]


shapes = st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda shape: shape[0] * shape[1] > 1)


@given(shapes, st.booleans(), st.floats(1e3, 1e8))
def test_a_ring_by_its_formula_costs_what_its_rounds_cost(
    shape: tuple[int, int], shared_nic: bool, nbytes: float
) -> None:
    cluster = cluster_of(*shape, shared_nic)
    walked = price(Ring().schedule(cluster.hosts), nbytes, cluster)
    assert Collectives(cluster)._ring_s(nbytes) == pytest.approx(walked)


@given(shapes, st.booleans(), st.floats(1e3, 1e8))
def test_hierarchical_by_its_formula_costs_what_its_rounds_cost(
    shape: tuple[int, int], shared_nic: bool, nbytes: float
) -> None:
    cluster = cluster_of(*shape, shared_nic, device=Device(call_s=0.0))
    walked = price(Hierarchical().schedule(cluster.hosts), nbytes, cluster)
    assert Collectives(cluster)._hierarchical_s(nbytes, cluster) == pytest.approx(walked)


@given(st.sampled_from([(1, 2), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)]), st.booleans(), st.floats(1e3, 1e8))
def test_halving_and_doubling_by_its_formula_costs_what_its_rounds_cost(
    shape: tuple[int, int], shared_nic: bool, nbytes: float
) -> None:
    cluster = cluster_of(*shape, shared_nic)
    walked = price(HalvingDoubling().schedule(cluster.hosts), nbytes, cluster)
    assert Collectives(cluster)._closed_form(HalvingDoubling(), nbytes)[0] == pytest.approx(walked)


@given(st.integers(3, 20), st.floats(1e4, 1e8))
def test_trees_on_equal_links_by_their_formula_cost_what_their_rounds_cost(n: int, nbytes: float) -> None:
    link = Link(60e-6, 110e6)
    cluster = Cluster(tuple((rank,) for rank in range(n)), link, link)
    walked = price(Tree().schedule(cluster.hosts), nbytes, cluster)
    assert Collectives(cluster)._closed_form(Tree(), nbytes)[0] == pytest.approx(walked)


@given(st.sampled_from([Native(), Ring(), Tree(), HalvingDoubling(), Hierarchical()]), shapes, st.floats(1e4, 1e7))
def test_more_bytes_take_longer(algorithm: object, shape: tuple[int, int], nbytes: float) -> None:
    collectives = Collectives(cluster_of(*shape))
    costs = [collectives.sum(algorithm, size).seconds for size in (nbytes, 8 * nbytes)]  # type: ignore[arg-type]
    assert costs[0] < costs[1]


def test_one_rank_alone_has_nothing_to_send() -> None:
    collectives = Collectives(cluster_of(1, 1))
    assert collectives.sum(None, 1e6) == collectives.gather(1e6) == collectives.trade(1e6) == (0.0, 0.0, 0.0)
    assert collectives.header().seconds == 0.0


def header_s(hosts: int, per_host: int) -> float:
    link = Link(50e-6, 1e9)
    ranks = tuple(tuple(range(at, at + per_host)) for at in range(0, hosts * per_host, per_host))
    return Collectives(Cluster(ranks, Link(5e-6, 1e11), link, backend="nccl")).header().seconds


def test_a_header_takes_as_many_turns_as_the_logarithm_of_the_hosts() -> None:
    call_s = Cluster(((0,), (1,)), Link(1e-6, 1e9), Link(1e-6, 1e9)).device.call_s
    for hosts, turns in ((2, 2), (16, 5), (256, 11), (2048, 16), (4096, 17)):
        assert header_s(hosts, 8) - call_s == pytest.approx(turns * 50e-6 + 4 * 5e-6)
    assert header_s(2048, 8) < 3 * header_s(16, 8)  # three levels, and 128 times as many


def test_ranks_of_one_host_use_its_memory() -> None:
    collectives = Collectives(cluster_of(1, 4, memory=Link(1e-6, 8e9)))
    assert collectives.resolve(None, 1e6) == SharedMemory()
    assert collectives.sum(None, 1e6).nbytes == 0
    assert Collectives(cluster_of(1, 4)).resolve(None, 1e6) == Native()


def test_hosts_of_many_ranks_go_by_their_hierarchy() -> None:
    collectives = Collectives(cluster_of(2, 4, memory=Link(1e-6, 8e9)))
    assert collectives.resolve(None, 25e6) == Hierarchical()
    assert collectives.sum(None, 25e6).nbytes == pytest.approx(25e6 / 4)  # each rank its share: 2(m−1)/m of S/g
    without = Collectives(cluster_of(2, 4)).sum(Hierarchical(), 25e6).nbytes
    assert without == pytest.approx(25e6 / 4 + 2 * 3 / 4 * 25e6)  # and inside the host, where that is not memory


def test_two_phases_send_less_than_a_gather_from_three_ranks_on() -> None:
    collectives = Collectives(cluster_of(5, 1))
    there, back = collectives.trade(1e6), collectives.gather(1e6 / 5)
    assert there.nbytes + back.nbytes == pytest.approx(2 * 4 / 5 * 1e6)
    assert collectives.gather(1e6).nbytes == pytest.approx(4e6)


def test_hosts_of_unequal_size_are_walked_through() -> None:
    cluster = Cluster(((0, 1, 2), (3,)), INSIDE, ACROSS)
    assert Collectives(cluster)._hierarchical_s(1e6, cluster) == price(
        Hierarchical().schedule(cluster.hosts), 1e6, cluster
    )


def test_many_hosts_of_unequal_size_cost_as_if_all_were_as_large_as_the_largest() -> None:
    uneven = Cluster((*(tuple(range(8 * h, 8 * h + 8)) for h in range(500)), (4000,)), INSIDE, ACROSS)
    cost = Collectives(uneven).sum(Hierarchical(), 25e6)
    assert cost.seconds == pytest.approx(Collectives(cluster_of(501, 8)).sum(Hierarchical(), 25e6).seconds, rel=0.01)


def test_a_hundred_thousand_ranks_are_priced_by_formula() -> None:
    collectives = Collectives(cluster_of(12500, 8))
    costs = [collectives.sum(algorithm, 25e6).seconds for algorithm in collectives.candidates()]
    assert all(0 < cost < 1e4 for cost in costs)
    assert collectives.resolve(None, 1e3) != Ring()  # latency counts by the rank


@pytest.mark.parametrize("hosts", [((0, 1, 2),), ((0,), (1,), (2,))])
def test_an_all_reduce_over_nccl_of_ranks_that_were_probed_costs_what_it_took(
    hosts: tuple[tuple[int, ...], ...],
) -> None:
    probed = Cluster(hosts, INSIDE, ACROSS, backend="nccl", calibrated=True)
    link = INSIDE if len(hosts) == 1 else ACROSS
    for nbytes in (3e3, 3e5, 3e8):
        took = 4 * link.seconds(nbytes / 3)
        assert Collectives(probed).sum(None, nbytes).seconds == pytest.approx(took)


def test_where_hosts_have_several_ranks_nccl_is_priced_by_its_own_model() -> None:
    """Each tier was probed alone, and an all-reduce of all ranks never."""
    costs = [
        Collectives(cluster_of(2, 2, backend="nccl", calibrated=calibrated)).sum(None, 1e8) for calibrated in (0, 1)
    ]
    assert costs[0] == costs[1]
