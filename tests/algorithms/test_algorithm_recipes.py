"""What every algorithm keeps to, for any number of ranks and any hosts."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playback import RECIPES, adds_up, host_lists, play

from gradsync.algorithms.check import check
from gradsync.algorithms.halving_doubling import halving_doubling
from gradsync.algorithms.hierarchical import hierarchical
from gradsync.algorithms.ring import ring
from gradsync.algorithms.schedule import Recipe, Schedule
from gradsync.algorithms.tree import tree

recipes = st.sampled_from(RECIPES)
few = settings(max_examples=15, deadline=None)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_every_rank_ends_with_every_contribution_once_for_1_to_64_ranks(recipe: Recipe) -> None:
    for n in range(1, 65):
        check(recipe.schedule(n))


@settings(max_examples=40, deadline=None)
@given(recipe=recipes, hosts=host_lists())
def test_every_rank_ends_with_every_contribution_once_on_any_hosts(recipe: Recipe, hosts: list[list[int]]) -> None:
    check(recipe.schedule(hosts))


@few
@given(recipe=recipes, hosts=host_lists(max_ranks=20))
def test_numbers_add_up_too(recipe: Recipe, hosts: list[list[int]]) -> None:
    assert adds_up(recipe.schedule(hosts))


@few
@given(recipe=recipes, hosts=host_lists(max_ranks=20), seed=st.integers(0, 99))
def test_all_ranks_end_with_equal_bits(recipe: Recipe, hosts: list[list[int]], seed: int) -> None:
    schedule = recipe.schedule(hosts)
    noise = random.Random(seed)
    values = [
        [noise.gauss(0, 10.0 ** noise.randint(-8, 8)) for _ in range(schedule.num_chunks)]
        for _ in range(schedule.world_size)
    ]
    first, *others = play(schedule, values)
    assert all(other == first for other in others)
    for chunk, value in enumerate(first):
        exact = math.fsum(values[rank][chunk] for rank in range(len(values)))
        assert value == pytest.approx(exact, rel=1e-12, abs=1e-12 * max(abs(mine[chunk]) for mine in values))


@few
@given(recipe=recipes, hosts=host_lists())
def test_no_transfer_is_wasted(recipe: Recipe, hosts: list[list[int]]) -> None:
    schedule = recipe.schedule(hosts)
    n = schedule.world_size
    adds = Counter(t.chunk for transfers in schedule.rounds for t in transfers if t.add)
    copies = Counter(t.chunk for transfers in schedule.rounds for t in transfers if not t.add)
    every_chunk = dict.fromkeys(range(schedule.num_chunks), n - 1) if n > 1 else {}
    assert adds == every_chunk
    assert copies == every_chunk
    assert all(schedule.rounds)


@few
@given(recipe=recipes, hosts=host_lists())
def test_no_rank_receives_a_chunk_in_the_round_in_which_it_sends_it(recipe: Recipe, hosts: list[list[int]]) -> None:
    """So that an executor may receive in place, without a copy of what stood there before the round."""
    for transfers in recipe.schedule(hosts).rounds:
        assert not {(t.src, t.chunk) for t in transfers} & {(t.dst, t.chunk) for t in transfers}


@few
@given(recipe=recipes, hosts=host_lists())
def test_a_recipe_makes_the_same_schedule_on_every_rank(recipe: Recipe, hosts: list[list[int]]) -> None:
    assert recipe.schedule(hosts) == recipe.schedule(tuple(tuple(host) for host in hosts))


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_one_rank_needs_no_round(recipe: Recipe) -> None:
    assert recipe.schedule(1).rounds == ()


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_a_number_of_ranks_means_one_host(recipe: Recipe) -> None:
    assert recipe.schedule(6) == recipe.schedule([range(6)])


def test_numbers_of_rounds() -> None:
    for n in [*range(2, 18), 31, 32, 33, 63, 64]:
        height = int(math.log2(n))
        folds = 0 if n == 2**height else 2
        assert len(ring().schedule(n).rounds) == 2 * (n - 1)
        assert len(halving_doubling().schedule(n).rounds) == 2 * height + folds
        assert len(tree(5).schedule(n).rounds) == 2 * (height + 5 - 1)


@few
@given(hosts=host_lists())
def test_hierarchical_has_the_rounds_of_its_largest_host_and_of_a_ring_of_hosts(hosts: list[list[int]]) -> None:
    assert len(hierarchical().schedule(hosts).rounds) == 2 * (max(map(len, hosts)) - 1) + 2 * (len(hosts) - 1)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 31, 64])
def test_every_rank_of_a_ring_sends_the_least_possible_bytes(n: int) -> None:
    assert _sent(ring().schedule(n)) == dict.fromkeys(range(n), 2 * (n - 1) / n)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
def test_every_rank_of_halving_doubling_sends_the_least_possible_bytes(n: int) -> None:
    assert _sent(halving_doubling().schedule(n)) == dict.fromkeys(range(n), 2 * (n - 1) / n)


@pytest.mark.parametrize("n", [3, 4, 7, 8, 9, 21, 32, 63])
def test_no_rank_of_a_pair_of_trees_sends_or_receives_more_than_twice_the_data(n: int) -> None:
    assert max(_sent(tree(3).schedule(n)).values()) <= 2
    assert max(_received(tree(3).schedule(n)).values()) <= 2


@few
@given(hosts=host_lists())
def test_hierarchical_crosses_a_host_border_with_the_least_possible_bytes(hosts: list[list[int]]) -> None:
    m = len(hosts)
    leaving, entering = _crossing(hierarchical().schedule(hosts), hosts)
    every_host = pytest.approx([2 * (m - 1) / m] * m)
    assert leaving == every_host
    assert entering == every_host


@few
@given(hosts=host_lists().filter(lambda hosts: len(hosts) > 1))
def test_a_flat_ring_crosses_each_host_border_with_what_one_rank_sends(hosts: list[list[int]]) -> None:
    n = sum(map(len, hosts))
    leaving, entering = _crossing(ring().schedule(hosts), hosts)
    assert leaving == entering == pytest.approx([2 * (n - 1) / n] * len(hosts))


@few
@given(hosts=host_lists())
def test_hierarchical_deals_the_work_across_hosts_out_evenly(hosts: list[list[int]]) -> None:
    """A rank of a host of g sends at most 1/4 more across than 1/g of what the host sends."""
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    schedule = hierarchical().schedule(hosts)
    across = Counter(t.src for transfers in schedule.rounds for t in transfers if host_of[t.src] != host_of[t.dst])
    m = len(hosts)
    for rank, num_chunks in across.items():
        share = num_chunks / schedule.num_chunks / (2 * (m - 1) / m)
        assert share <= 1.25 / len(hosts[host_of[rank]]) + 1e-9


def test_halving_doubling_sends_its_largest_messages_inside_hosts() -> None:
    hosts = [[0, 1, 2, 3], [4, 5, 6, 7]]
    leaving, _ = _crossing(halving_doubling().schedule(hosts), hosts)
    assert leaving == [1.0, 1.0]  # of 7 in all: 4 ranks, an eighth each, both ways


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "8", None])
def test_a_pipeline_without_chunks_is_refused(count: object) -> None:
    with pytest.raises(ValueError, match="tree: num_pipeline_chunks must be a whole number of at least 1"):
        tree(count)  # type: ignore[arg-type]


def _sent(schedule: Schedule) -> dict[int, float]:
    """What each rank sends, with the data as 1."""
    sent = Counter(t.src for transfers in schedule.rounds for t in transfers)
    return {rank: num / schedule.num_chunks for rank, num in sorted(sent.items())}


def _received(schedule: Schedule) -> dict[int, float]:
    received = Counter(t.dst for transfers in schedule.rounds for t in transfers)
    return {rank: num / schedule.num_chunks for rank, num in sorted(received.items())}


def _crossing(schedule: Schedule, hosts: list[list[int]]) -> tuple[list[float], list[float]]:
    """What leaves and what enters each host, with the data as 1."""
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    leaving, entering = [0.0] * len(hosts), [0.0] * len(hosts)
    for transfers in schedule.rounds:
        for t in transfers:
            if host_of[t.src] != host_of[t.dst]:
                leaving[host_of[t.src]] += 1 / schedule.num_chunks
                entering[host_of[t.dst]] += 1 / schedule.num_chunks
    return leaving, entering
