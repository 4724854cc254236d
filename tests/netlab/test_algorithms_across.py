"""Between hosts an algorithm sends what its schedule says, and hierarchical() the least that is possible."""

from __future__ import annotations

import pytest

from gradsync.cluster import Hosts
from netlab.algorithm_plays import ask_for_shared_memory, reduce_and_count
from netlab.fixture import MakeLab
from netlab.lab_plays import ALGORITHMS, train

EQUAL, UNEQUAL = ((0, 1), (2, 3)), ((0,), (1, 2))
NUMELS = [500_000, 1_000_000]  # of 4 bytes; the difference of the two has no control messages in it


def by_schedule(name: str, hosts: Hosts, host: int) -> float:
    """The share of the data that leaves a host."""
    schedule, mine = ALGORITHMS[name].schedule(hosts), hosts[host]
    crossing = sum(t.src in mine and t.dst not in mine for transfers in schedule.rounds for t in transfers)
    return crossing / schedule.num_chunks


@pytest.mark.parametrize("hosts", [EQUAL, UNEQUAL], ids=["2+2", "1+2"])
def test_every_algorithm_is_exact_and_sends_what_its_schedule_says(hosts: Hosts, lab: MakeLab) -> None:
    names = list(ALGORITHMS)
    seen = lab().spawn(reduce_and_count, [len(host) for host in hosts], names, NUMELS)
    more = 4 * (NUMELS[1] - NUMELS[0])
    for rank in seen:
        # Two hosts, though it is one machine: shared memory is used inside each only.
        assert [tuple(host) for host in rank["hosts"]] == list(hosts)
        assert rank["exact"] == dict.fromkeys(names, True)
    for index, host in enumerate(hosts):
        for name, (small, large) in seen[host[0]]["sent"].items():
            assert large - small == pytest.approx(by_schedule(name, hosts, index) * more, rel=0.03), (name, index)
        m = len(hosts)
        small, large = seen[host[0]]["sent"]["hierarchical"]
        assert large - small == pytest.approx(2 * (m - 1) / m * more, rel=0.03)


def test_a_flat_ring_sends_half_as_much_again_over_the_border() -> None:
    assert [by_schedule(name, EQUAL, 0) for name in ("hierarchical", "ring")] == [1.0, 1.5]


def test_shared_memory_is_refused_between_hosts(lab: MakeLab) -> None:
    said = lab().spawn(ask_for_shared_memory, [2, 2])
    assert (
        said
        == [
            "gs.shared_memory() is for the ranks of one host, but this group spans 2; "
            "use gs.hierarchical(), which uses shared memory inside each"
        ]
        * 4
    )


def test_training_across_hosts_keeps_replicas_equal(lab: MakeLab) -> None:
    _, weights, moved = zip(*lab().spawn(train, [2, 2], 3, "hierarchical"), strict=True)
    assert weights[1:] == weights[:-1]
    assert min(moved) > 0
