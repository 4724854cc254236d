"""NCCL's cost model: the worked figures, the published latency table, and how a NIC limits rings and trees."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.cluster import Link
from gradsync.planner.nccl import (
    Generation,
    Name,
    NcclCost,
    Protocol,
    all_reduce_costs,
    generation_of,
    latency_us,
)

NVLINK3 = Link(2e-6, 230e9)
NVLINK4 = Link(2e-6, 480e9)
PCIE4 = Link(2e-6, 24e9)
ETHERNET_100G = Link(2e-6, 11e9)


def all_reduce_s(*args: Any, **terms: Any) -> NcclCost:
    """The cheapest way, which is the one that NCCL takes."""
    return min(all_reduce_costs(*args, **terms))


GENERATIONS: tuple[Generation, ...] = ("volta", "ampere", "hopper", "blackwell")


def way(costs: list[NcclCost], algorithm: Name, protocol: Protocol = "Simple") -> float:
    return next(cost.seconds for cost in costs if cost[1:] == (algorithm, protocol))


@pytest.mark.parametrize(
    ("num_hosts", "tree", "ring"),
    [
        (1, (15.2, 31.5, 64.4), (15.0, 40.6, 56.0)),
        (2, (25.2, 48.5, 92.4), (40.0, 75.2, 131.6)),
        (4, (35.2, 65.5, 120.4), (78.8, 144.4, 282.8)),
        (16, (55.2, 99.5, 176.4), (311.6, 559.6, 1190.0)),
    ],
)
def test_latencies_are_those_of_nccl(num_hosts: int, tree: tuple[float, ...], ring: tuple[float, ...]) -> None:
    protocols: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
    assert [round(latency_us("tree", p, num_hosts, 8), 1) for p in protocols] == list(tree)
    assert [round(latency_us("ring", p, num_hosts, 8), 1) for p in protocols] == list(ring)


def test_a_large_ring_across_hosts_pays_its_latency_1_4_times() -> None:
    """Beyond 64 bytes per channel and rank: 131.6 us become 184.2."""
    fast = Link(0.0, 1e15)
    costs = all_reduce_costs(1e6, 2, 8, fast, fast)
    assert way(costs, "ring") * 1e6 == pytest.approx(184.2, abs=0.1)


def test_eight_a100_sum_2_gb_in_15_ms() -> None:
    cost = all_reduce_s(2e9, 1, 8, NVLINK3, ETHERNET_100G)
    assert cost.seconds == pytest.approx(15.2e-3, rel=0.02)
    assert cost.algorithm == "ring"


def test_two_hosts_on_one_100g_nic_each_take_197_ms_by_tree() -> None:
    cost = all_reduce_s(2e9, 2, 8, NVLINK3, ETHERNET_100G)
    assert cost.seconds == pytest.approx(197e-3, rel=0.02)
    assert cost.algorithm == "tree"


def test_a_flat_ring_over_two_hosts_sends_1_875_times_as_much_through_the_nic() -> None:
    costs = all_reduce_costs(2e9, 2, 8, NVLINK3, ETHERNET_100G)
    one_sum_each_way_s = 2e9 / 11e9
    assert way(costs, "ring") == pytest.approx(1.875 * one_sum_each_way_s, rel=0.002)


def test_a_nic_per_rank_is_eight_times_as_fast() -> None:
    shared = all_reduce_costs(2e9, 4, 8, NVLINK3, ETHERNET_100G)
    own = all_reduce_costs(2e9, 4, 8, NVLINK3, ETHERNET_100G, shared_nic=False)
    assert way(own, "ring") == pytest.approx(way(shared, "ring") / 8, rel=0.02)


def test_eight_h100_reach_the_bandwidth_of_the_link_by_nvls_and_less_by_ring() -> None:
    cost = all_reduce_s(2e9, 1, 8, NVLINK4, ETHERNET_100G, generation="hopper")
    assert cost.algorithm == "NVLS"
    assert cost.seconds == pytest.approx(7.3e-3, rel=0.02)
    ring_s = way(all_reduce_costs(2e9, 1, 8, NVLINK4, ETHERNET_100G, generation="hopper"), "ring")
    assert ring_s == pytest.approx(1.75 * 2e9 / 370e9, rel=0.02)


def test_small_messages_take_the_protocol_of_low_latency() -> None:
    for num_hosts in (1, 2, 16):
        assert all_reduce_s(1024, num_hosts, 8, NVLINK3, ETHERNET_100G).protocol == "LL"
        assert all_reduce_s(1e9, num_hosts, 8, NVLINK3, ETHERNET_100G).protocol == "Simple"


def test_at_many_hosts_trees_win_small_messages_because_a_ring_passes_all_ranks() -> None:
    assert all_reduce_s(1024, 64, 8, NVLINK3, ETHERNET_100G).algorithm == "tree"
    assert latency_us("ring", "LL", 64, 8) > 10 * latency_us("tree", "LL", 64, 8)


def test_gpus_on_pcie_have_neither_ll128_nor_nvls() -> None:
    costs = all_reduce_costs(1e6, 1, 4, PCIE4, ETHERNET_100G, generation="hopper")
    assert {(cost.algorithm, cost.protocol) for cost in costs} == {
        ("ring", "LL"),
        ("ring", "Simple"),
        ("tree", "LL"),
        ("tree", "Simple"),
    }


def test_one_gpu_per_host_is_limited_by_the_network_alone() -> None:
    cost = all_reduce_s(1e9, 4, 1, PCIE4, ETHERNET_100G)
    assert cost.seconds == pytest.approx(1.5 * 1e9 / 11e9, rel=0.02)


def test_a_wire_slower_than_rdma_adds_what_it_takes_longer_and_twice_in_the_simple_protocol() -> None:
    """A tree over two hosts crosses twice; TCP at 50 us is 36 slower than the hop of RDMA."""
    protocols: tuple[tuple[Protocol, int], ...] = (("LL", 1), ("Simple", 2))
    for protocol, times in protocols:
        fast, slow = (latency_us("tree", protocol, 2, 8, net_s) for net_s in (14e-6, 50e-6))
        assert fast == latency_us("tree", protocol, 2, 8)
        assert slow - fast == pytest.approx(2 * 36 * times)


@pytest.mark.parametrize(
    ("device", "generation"),
    [
        ("v100", "volta"),
        ("Tesla T4", "volta"),
        ("a100-40gb", "ampere"),
        ("l40s", "ampere"),
        ("h100-pcie", "hopper"),
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA B200", "blackwell"),
        ("something else", "ampere"),
    ],
)
def test_a_device_is_of_the_generation_that_its_name_says(device: str, generation: str) -> None:
    assert generation_of(device) == generation


def test_one_rank_alone_sends_nothing_in_no_time() -> None:
    assert all_reduce_s(1e9, 1, 1, NVLINK3, ETHERNET_100G).seconds == 0.0


@given(
    st.floats(0, 1e12),
    st.integers(1, 12_500),
    st.integers(1, 16),
    st.booleans(),
    st.sampled_from(GENERATIONS),
)
def test_a_double_of_bytes_or_half_of_a_nic_never_costs_less(
    nbytes: float, num_hosts: int, per_host: int, shared_nic: bool, generation: Generation
) -> None:
    def seconds(nbytes: float, bandwidth: float) -> float:
        across = Link(2e-6, bandwidth)
        return all_reduce_s(nbytes, num_hosts, per_host, NVLINK3, across, shared_nic, generation).seconds

    here = seconds(nbytes, 11e9)
    assert 0 <= here < float("inf")
    assert seconds(2 * nbytes, 11e9) >= here
    assert seconds(nbytes, 5.5e9) >= here


@given(st.integers(1, 6_000), st.sampled_from(GENERATIONS))
def test_latency_grows_with_the_number_of_hosts(num_hosts: int, generation: Generation) -> None:
    here, twice = (
        all_reduce_s(1e3, hosts, 8, NVLINK3, ETHERNET_100G, generation=generation).seconds
        for hosts in (num_hosts, 2 * num_hosts)
    )
    assert twice > here


def test_impossible_numbers_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="nbytes must be a number of bytes, 0 or more, got -1"):
        all_reduce_s(-1, 1, 8, NVLINK3, ETHERNET_100G)
    with pytest.raises(ValueError, match="per_host must be a whole number of at least 1, got 0"):
        all_reduce_s(1, 1, 0, NVLINK3, ETHERNET_100G)
    with pytest.raises(ValueError, match="generation must be one of volta, ampere, hopper, blackwell, got 'pascal'"):
        all_reduce_s(1, 1, 8, NVLINK3, ETHERNET_100G, generation="pascal")  # type: ignore[arg-type]
