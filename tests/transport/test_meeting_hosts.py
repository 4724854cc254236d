"""Who shares a host: what ranks declare, as far as they really see each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.cluster import Hosts
from gradsync.exchange.group_cache import group_cache
from gradsync.plan.guard import Guard
from gradsync.transport import host_meeting
from gradsync.transport.host_meeting import declare_host, host_identity
from gradsync.transport.lane import open_lane
from gradsync.transport.liveness import LocalPeer
from gradsync.transport.store_tree import BLOCK
from simulated_store import SimulatedMeeting

# What ranks say and see, as pure data


def found(identities: Sequence[str], blind: Iterable[tuple[int, int]], block: int = BLOCK) -> Hosts:
    """What ranks that declare this find, in a simulation; `blind`: pairs of who does not see whom."""
    return SimulatedMeeting(identities, blind, block=block).run().hosts()


@pytest.mark.parametrize(
    ("identities", "blind", "hosts"),
    [
        ("aaa", set(), ((0, 1, 2),)),
        ("abab", set(), ((0, 2), (1, 3))),
        ("abc", set(), ((0,), (1,), (2,))),
        ("a", set(), ((0,),)),
        ("aab", {(0, 2), (2, 0)}, ((0, 1), (2,))),  # hosts of other names need not see each other
        ("aa", {(0, 1)}, ((0,), (1,))),  # one-sided
        ("aa", {(1, 0)}, ((0,), (1,))),
        ("aaab", {(0, 1)}, ((0,), (1,), (2,), (3,))),  # one blind pair, and the whole host does without
        ("aabb", {(3, 2)}, ((0, 1), (2,), (3,))),  # the other host keeps its own
    ],
)
def test_a_host_is_one_only_if_all_its_ranks_see_each_other(
    identities: str, blind: set[tuple[int, int]], hosts: tuple[tuple[int, ...], ...]
) -> None:
    for block in (2, 3, BLOCK):
        assert found(identities, blind, block) == hosts


@given(st.data())
def test_hosts_divide_the_ranks_whatever_they_say_and_see(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 14))
    identities = data.draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda pair: pair[0] != pair[1])
    blind = data.draw(st.sets(pairs)) if size > 1 else set()
    hosts = found(identities, blind, data.draw(st.integers(2, 8)))
    assert sorted(rank for host in hosts for rank in host) == list(range(size))
    assert list(hosts) == sorted(hosts)
    for host in hosts:
        assert list(host) == sorted(host)
        assert len({identities[rank] for rank in host}) == 1
        assert not any((a, b) in blind for a in host for b in host)
    for name in set(identities):
        ranks = [rank for rank in range(size) if identities[rank] == name]
        if not any((a, b) in blind for a in ranks for b in ranks):
            assert tuple(ranks) in hosts


def test_a_declared_name_counts_until_it_is_taken_back() -> None:
    said = host_identity()
    declare_host("a")
    try:
        assert host_identity() == "declared:a"
    finally:
        declare_host(None)
    assert host_identity() == said
    assert said != "declared:a"


@pytest.mark.parametrize("name", ["", 3, b"a"])
def test_a_host_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="host must be a name such as 'a'"):
        gs.init(host=name)


# Real ranks


def declare(names: str, block: int = BLOCK) -> tuple[Any, ...]:
    """What this rank finds when every rank declares its letter, and ranks meet in blocks of so many."""
    gs.init(host=names[dist.get_rank()])
    host_meeting.BLOCK = block
    try:
        total = gs.all_reduce(torch.tensor(float(dist.get_rank())), op="sum").item()
        lane = group_cache(dist.group.WORLD).lane  # type: ignore[arg-type]
        members = lane.team.members if lane.team is not None else None
        watched = sorted(lane.liveness.pidfds())
        return lane.hosts, members, lane.one_host, watched, total
    finally:
        declare_host(None)
        host_meeting.BLOCK = BLOCK


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("aaaa", ((0, 1, 2, 3),)),
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("abbb", ((0,), (1, 2, 3))),
        ("abcd", ((0,), (1,), (2,), (3,))),
    ],
)
def test_declared_hosts_split_a_group_and_its_teams(
    names: str, hosts: tuple[tuple[int, ...], ...], run: Callable[..., Any]
) -> None:
    for rank, (found, members, one_host, watched, total) in enumerate(run(declare, names, ranks=4)):
        [mine] = [host for host in hosts if rank in host]
        assert found == hosts
        assert members == (None if len(hosts) == 4 else mine)
        assert one_host == (len(hosts) == 1)
        assert watched == [other for other in mine if other != rank]  # others are out of sight
        assert total == 6.0


@pytest.mark.parametrize("names", ["aaaa", "aabb", "abab", "abba"])
def test_ranks_in_two_blocks_find_what_one_block_finds(names: str, run: Callable[..., Any]) -> None:
    assert run(declare, names, 2, ranks=4) == run(declare, names, ranks=4)


def look_away(blind: int, block: int = BLOCK) -> tuple[Any, ...]:
    """One rank cannot open its peers' pages, though all are on one host: a hardened kernel, say."""
    original, host_meeting.BLOCK = LocalPeer.find, block
    if dist.get_rank() == blind:
        LocalPeer.find = classmethod(lambda cls, pid, fd, nonce: None)  # type: ignore[assignment,method-assign]
    try:
        lane = open_lane(dist.group.WORLD, Guard(), 60)  # type: ignore[arg-type]
        lane.open_team(64)
        found = lane.hosts, lane.team, lane.lacks
        dist.barrier()
        lane.close(together=True)
        total = gs.all_reduce(torch.ones(5000), op="sum")[-1].item()
        return (*found, total)
    finally:
        LocalPeer.find = original  # type: ignore[method-assign]
        host_meeting.BLOCK = BLOCK


@pytest.mark.parametrize("blind", [0, 2])
def test_one_sided_sight_makes_hosts_of_their_own_and_sums_stay_right(blind: int, run: Callable[..., Any]) -> None:
    for block in (BLOCK, 2):
        assert run(look_away, blind, block, ranks=3) == [(((0,), (1,), (2,)), None, "", 3.0)] * 3
