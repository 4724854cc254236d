"""The checker can fail: whatever breaks a schedule, it refuses it, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playback import RECIPES, adds_up, host_lists

from gradsync.algorithms.check import check
from gradsync.algorithms.halving_doubling import halving_doubling
from gradsync.algorithms.hierarchical import hierarchical
from gradsync.algorithms.ring import ring
from gradsync.algorithms.schedule import Recipe, Round, Schedule, Transfer
from gradsync.algorithms.tree import tree

recipes = st.sampled_from(RECIPES)
some_hosts = host_lists(max_ranks=14).filter(lambda hosts: sum(map(len, hosts)) > 1)


def _drop(transfers: Round, index: int) -> Round:
    return transfers[:index] + transfers[index + 1 :]


def _double(transfers: Round, index: int) -> Round:
    return (*transfers, transfers[index])


def _flip(transfers: Round, index: int) -> Round:
    flipped = replace(transfers[index], add=not transfers[index].add)
    return (*transfers[:index], flipped, *transfers[index + 1 :])


@settings(max_examples=100, deadline=None)
@given(recipe=recipes, hosts=some_hosts, breaks=st.sampled_from([_drop, _double, _flip]), data=st.data())
def test_a_dropped_doubled_or_flipped_transfer_is_refused(
    recipe: Recipe, hosts: list[list[int]], breaks: Callable[[Round, int], Round], data: st.DataObject
) -> None:
    schedule = recipe.schedule(hosts)
    at, index = _pick(schedule, data)
    rounds = list(schedule.rounds)
    rounds[at] = breaks(rounds[at], index)
    assert not _passes(replace(schedule, rounds=tuple(rounds)))


@settings(max_examples=50, deadline=None)
@given(recipe=recipes, hosts=some_hosts, data=st.data())
def test_a_transfer_repeated_in_any_later_round_is_refused(
    recipe: Recipe, hosts: list[list[int]], data: st.DataObject
) -> None:
    schedule = recipe.schedule(hosts)
    at, index = _pick(schedule, data)
    later = data.draw(st.integers(at, len(schedule.rounds)))
    rounds = [*schedule.rounds, ()]
    rounds[later] = (*rounds[later], schedule.rounds[at][index])
    assert not _passes(replace(schedule, rounds=tuple(rounds)))


@settings(max_examples=100, deadline=None)
@given(recipe=recipes, hosts=some_hosts, data=st.data())
def test_a_transfer_in_another_round_is_refused_unless_the_numbers_still_add_up(
    recipe: Recipe, hosts: list[list[int]], data: st.DataObject
) -> None:
    schedule = recipe.schedule(hosts)
    at, index = _pick(schedule, data)
    to = data.draw(st.integers(0, len(schedule.rounds) - 1))
    rounds = list(schedule.rounds)
    moved = rounds[at][index]
    rounds[at] = _drop(rounds[at], index)
    rounds[to] = (*rounds[to], moved)
    _assert_no_worse_than_the_numbers(replace(schedule, rounds=tuple(rounds)))


@settings(max_examples=60, deadline=None)
@given(recipe=recipes, hosts=some_hosts, data=st.data())
def test_swapped_rounds_are_refused_unless_the_numbers_still_add_up(
    recipe: Recipe, hosts: list[list[int]], data: st.DataObject
) -> None:
    schedule = recipe.schedule(hosts)
    a, b = (data.draw(st.integers(0, len(schedule.rounds) - 1)) for _ in range(2))
    rounds = list(schedule.rounds)
    rounds[a], rounds[b] = rounds[b], rounds[a]
    _assert_no_worse_than_the_numbers(replace(schedule, rounds=tuple(rounds)))


@settings(max_examples=30, deadline=None)
@given(recipe=recipes, hosts=some_hosts)
def test_a_schedule_run_backwards_is_refused(recipe: Recipe, hosts: list[list[int]]) -> None:
    schedule = recipe.schedule(hosts)
    assert not _passes(replace(schedule, rounds=schedule.rounds[::-1]))


@pytest.mark.parametrize("recipe", [ring(), tree(1), halving_doubling(), hierarchical()], ids=repr)
@pytest.mark.parametrize("hosts", [2, 7, 8, [[0, 1, 2], [3, 4]]])
def test_a_result_sent_in_the_round_in_which_it_is_formed_is_refused(recipe: Recipe, hosts: Any) -> None:
    """Transfers of a round read what was there before it."""
    schedule = recipe.schedule(hosts)
    first_copy = next(i for i, transfers in enumerate(schedule.rounds) if not transfers[0].add)
    rounds = list(schedule.rounds)
    rounds[first_copy - 1 : first_copy + 1] = [rounds[first_copy - 1] + rounds[first_copy]]
    assert not _passes(replace(schedule, rounds=tuple(rounds)))


SMALL = [Transfer(src, dst, 0, add) for src in range(3) for dst in range(3) for add in (True, False) if src != dst]


def test_of_all_short_schedules_for_two_ranks_exactly_the_two_that_add_up_at_one_place_pass() -> None:
    of_two = [t for t in SMALL if t.src < 2 and t.dst < 2]
    every_round = [(), *((t,) for t in of_two), *product(of_two, repeat=2)]
    passing = [rounds for rounds in product(every_round, repeat=2) if _passes(Schedule(2, 1, rounds))]
    assert passing == [
        ((Transfer(0, 1, 0, True),), (Transfer(1, 0, 0, False),)),
        ((Transfer(1, 0, 0, True),), (Transfer(0, 1, 0, False),)),
    ]


@settings(max_examples=100, deadline=None)
@given(rounds=st.lists(st.lists(st.sampled_from(SMALL), max_size=2).map(tuple), max_size=4).map(tuple))
def test_no_random_schedule_passes_that_does_not_add_up(rounds: tuple[Round, ...]) -> None:
    _assert_no_worse_than_the_numbers(Schedule(3, 1, rounds))


ADD, COPY = True, False


@pytest.mark.parametrize(
    ("rounds", "says"),
    [
        (
            [[Transfer(0, 1, 0, ADD)], [Transfer(1, 2, 0, ADD)], [Transfer(0, 2, 0, ADD)]],
            "round 3: rank 2 gets the contribution of rank 0 to chunk 0 a second time, from rank 0",
        ),
        (
            [[Transfer(0, 1, 0, ADD)], [Transfer(1, 2, 0, COPY)]],
            "round 2: rank 1 passes chunk 0 on to rank 2 before the contribution of rank 2 has arrived",
        ),
        (
            [[Transfer(0, 1, 0, ADD), Transfer(2, 1, 0, ADD)], [Transfer(1, 0, 0, COPY)]],
            "after the last round rank 2 lacks the contribution of ranks 0 and 1 to chunk 0",
        ),
        (
            [[Transfer(0, 1, 0, ADD), Transfer(2, 1, 0, ADD), Transfer(0, 2, 0, ADD), Transfer(1, 2, 0, ADD)]],
            "round 1: the sum of chunk 0 is formed at rank 2, but was formed at rank 1 before; "
            "the two may differ in their last bits",
        ),
        (
            [
                [Transfer(0, 1, 0, ADD), Transfer(2, 1, 0, ADD)],
                [Transfer(1, 0, 0, COPY), Transfer(1, 2, 0, COPY)],
                [Transfer(0, 2, 0, COPY)],
            ],
            "round 3: rank 0 sends the sum of chunk 0 to rank 2, which has it or adds to it already",
        ),
        (
            [[Transfer(0, 1, 0, ADD), Transfer(2, 1, 0, ADD)], [Transfer(0, 2, 0, ADD), Transfer(1, 2, 0, COPY)]],
            "round 2: rank 1 sends the sum of chunk 0 to rank 2, which has it or adds to it already",
        ),
    ],
)
def test_the_sentence_says_where_and_who(rounds: list[list[Transfer]], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(Schedule(3, 1, tuple(map(tuple, rounds))))
    assert str(caught.value) == says


def test_an_empty_schedule_is_one_for_one_rank_only() -> None:
    check(Schedule(1, 4, ()))
    assert not _passes(Schedule(2, 4, ()))


def test_a_schedule_for_other_ranks_is_refused() -> None:
    assert not _passes(replace(ring().schedule(4), world_size=5))


def _pick(schedule: Schedule, data: st.DataObject) -> tuple[int, int]:
    at = data.draw(st.integers(0, len(schedule.rounds) - 1))
    return at, data.draw(st.integers(0, len(schedule.rounds[at]) - 1))


def _passes(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ValueError:
        return False
    return True


def _assert_no_worse_than_the_numbers(schedule: Schedule) -> None:
    if not adds_up(schedule):
        assert not _passes(schedule)
