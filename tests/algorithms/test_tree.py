"""The pair of trees, for every number of ranks."""

from __future__ import annotations

from collections import Counter

from gradsync.algorithms.tree import Parents, pair_of_trees


def test_every_rank_is_an_inner_node_in_at_most_one_tree() -> None:
    for n in range(1, 65):
        first, second = pair_of_trees(n)
        assert not _inner(first) & _inner(second), n


def test_both_are_binary_trees_over_all_ranks_of_the_least_height() -> None:
    for parents in (parents for n in range(1, 65) for parents in pair_of_trees(n)):
        n = len(parents)
        assert parents.count(None) == 1
        assert max(Counter(parent for parent in parents if parent is not None).values(), default=0) <= 2
        assert max(_depth(parents, position) for position in range(n)) == n.bit_length() - 1


def _inner(parents: Parents) -> set[int]:
    return {parent for parent in parents if parent is not None}


def _depth(parents: Parents, position: int) -> int:
    """Fails where there is a circle instead of a root."""
    depth, parent = 0, parents[position]
    while parent is not None:
        depth, parent = depth + 1, parents[parent]
        assert depth <= len(parents)
    return depth
