"""Every rank is in the tree once, hears of all, and says the same however many there are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.algorithms.control_tree import FAN_OUT, MAX_LOCAL, ControlTree

hosts = st.lists(st.integers(1, 9), min_size=1, max_size=40).map(
    lambda sizes: tuple(tuple(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes)))
)


@given(hosts, st.integers(2, 5))
def test_every_rank_is_below_the_root_once(hosts: tuple[tuple[int, ...], ...], fan_out: int) -> None:
    tree = ControlTree(hosts, fan_out)
    size = sum(map(len, hosts))
    assert sorted(tree.below(tree.root, len(tree.levels))) == list(range(size))


@given(hosts, st.integers(2, 5))
def test_a_rank_takes_part_in_four_subgroups_at_most_and_leads_one_between_hosts(
    hosts: tuple[tuple[int, ...], ...], fan_out: int
) -> None:
    tree = ControlTree(hosts, fan_out)
    for rank in range(sum(map(len, hosts))):
        climbed = tree.climb(rank)
        assert all(rank in subgroup.members for subgroup in climbed)
        assert [subgroup.level for subgroup in climbed] == sorted({subgroup.level for subgroup in climbed})
        assert len(climbed) <= 4
        led = [subgroup for subgroup in climbed if subgroup.level and subgroup.leader == rank]
        assert len(led) <= 1


@given(hosts, st.integers(2, 5))
def test_each_says_its_own_in_one_subgroup_and_who_leads_says_what_it_heard_in_the_next(
    hosts: tuple[tuple[int, ...], ...], fan_out: int
) -> None:
    tree = ControlTree(hosts, fan_out)
    for rank in range(sum(map(len, hosts))):
        climbed = tree.climb(rank)
        told = [subgroup for subgroup in climbed if subgroup.leader != rank]
        listening = [subgroup for subgroup in climbed if subgroup.leader == rank and subgroup.listens]
        assert len(told) <= 2
        assert len(listening) <= 1
        for subgroup in listening:  # it said its own before, and says what it heard after: nobody does for the root
            assert climbed[climbed.index(subgroup) - 1].leader != rank
            assert climbed[-1] is not subgroup or rank == tree.root
        assert told or rank == tree.root or len(tree.hosts[0]) == sum(map(len, hosts)) == 1


@given(hosts, st.integers(2, 5))
def test_subgroups_are_small_and_hosts_stay_whole(hosts: tuple[tuple[int, ...], ...], fan_out: int) -> None:
    tree = ControlTree(hosts, fan_out)
    assert {subgroup.members for subgroup in tree.levels[0]} == {host for host in hosts if len(host) > 1}
    for level in tree.levels[1:]:
        for subgroup in level:
            assert 2 <= len(subgroup.members) - subgroup.listens <= fan_out


@pytest.mark.parametrize(("ranks", "per_host"), [(8, 8), (1024, 8), (16384, 8), (16384, 1)])
def test_the_way_up_is_as_long_as_the_logarithm(ranks: int, per_host: int) -> None:
    tree = ControlTree(tuple(tuple(range(at, at + per_host)) for at in range(0, ranks, per_host)))
    num_hosts = ranks // per_host
    assert tree.depth == (per_host > 1) + math.ceil(math.log(max(num_hosts, 1), FAN_OUT) - 1e-9)
    most = max(sum(len(subgroup.members) - 1 for subgroup in tree.climb(rank)) for rank in range(ranks))
    assert most <= MAX_LOCAL + FAN_OUT * tree.depth


def test_a_host_of_very_many_ranks_is_cut() -> None:
    tree = ControlTree((tuple(range(200)),))
    assert all(len(subgroup.members) <= MAX_LOCAL for subgroup in tree.levels[0])
    assert sorted(tree.below(0, len(tree.levels))) == list(range(200))


def test_a_subgroup_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="fan_out=1"):
        ControlTree(((0,), (1,)), 1)
