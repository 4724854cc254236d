"""Runs a schedule on numbers, as plainly as its definition reads; and hosts and recipes to run it for."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gradsync.algorithms.halving_doubling import halving_doubling
from gradsync.algorithms.hierarchical import hierarchical
from gradsync.algorithms.ring import ring
from gradsync.algorithms.schedule import Recipe, Schedule
from gradsync.algorithms.tree import tree

RECIPES: list[Recipe] = [ring(), tree(1), tree(3), tree(8), halving_doubling(), hierarchical()]


def play(schedule: Schedule, values: list[list[Any]]) -> list[list[Any]]:
    """values[rank][chunk] before, and what it returns after."""
    now = [list(chunks) for chunks in values]
    for transfers in schedule.rounds:
        before = [list(chunks) for chunks in now]
        for t in transfers:
            sent = before[t.src][t.chunk]
            now[t.dst][t.chunk] = now[t.dst][t.chunk] + sent if t.add else sent
    return now


def adds_up(schedule: Schedule) -> bool:
    """Every rank ends with every contribution once. Rank r contributes 65**r, so no other sum looks the same."""
    values = [[(schedule.world_size + 1) ** rank] * schedule.num_chunks for rank in range(schedule.world_size)]
    total = sum(column[0] for column in values)
    return all(value == total for chunks in play(schedule, values) for value in chunks)


@st.composite
def host_lists(draw: st.DrawFn, max_ranks: int = 64) -> list[list[int]]:
    """Hosts of any sizes, their ranks in any order."""
    sizes: list[int] = []
    for size in draw(st.lists(st.integers(1, 17), min_size=1, max_size=9)):
        if sum(sizes) + size <= max_ranks:
            sizes.append(size)
    sizes = sizes or [1]
    ranks = list(range(sum(sizes)))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return [[ranks.pop(0) for _ in range(size)] for size in sizes]
