"""A pair of binary trees, each carrying half of the data in a pipeline of chunks: few rounds, full bandwidth.

In a tree half of the ranks are leaves, which receive nothing while it reduces and send nothing while it
spreads. So there are two trees, and who is inner in one is a leaf in the other: every rank has the same work.

    first: only odd ranks are inner        second, for even n: its mirror image, only even ranks are inner

              3                                               4
          ┌───┴───┐                                       ┌───┴───┐
          1       5                                       2       6
         ┌┴┐     ┌┴─┐                                   ┌─┴┐     ┌┴┐
         0 2     4  7                                   0  3     5 7
                   ┌┘                                   └┐
                   6                                     1

For odd n the second tree is the first with every rank moved on by one; then rank 0 is a leaf in both.

The pipeline, h = ⌊log2 n⌋ the height, k chunks per tree: a rank at depth d sends chunk c to its parent in
round h − d + c, so that both its children have arrived, and gets its sum back in round d − 1 + c.

    h = 3, k = 2     round  0   1   2   3  │  4   5   6   7
    depth 3 ⇄ 2             c0  c1         │          C0  C1
    depth 2 ⇄ 1                 c0  c1     │      C0  C1
    depth 1 ⇄ 0                     c0  c1 │  C0  C1

In every round a port carries at most two chunks of 1/(2k) of the data. With α, β, γ the seconds per
message, per byte and per byte added, and equal links, n ≥ 3 ranks take S bytes to

    2(h+k−1) α  +  (2(h+k−1) − p)/k · S β  +  (h+k−1 − p/2)/k · S γ

where p = 1 for a power of two (the deepest parent has one child: the first and the last round are half full)
and 0 otherwise. Two ranks take 2kα + Sβ + Sγ/2. The best k is near √((h−1)·S·(β + γ/2) / α).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.algorithms.schedule import Round, Schedule, Transfer, side_by_side
from gradsync.cluster import as_hosts

Parents = tuple[int | None, ...]  # by position; the root has None


@dataclass(frozen=True)
class Tree:
    """The recipe that `tree()` makes, its argument checked."""

    num_pipeline_chunks: int = 8

    def __post_init__(self) -> None:
        if type(self.num_pipeline_chunks) is not int or self.num_pipeline_chunks < 1:
            raise ValueError(
                f"tree: num_pipeline_chunks must be a whole number of at least 1, got {self.num_pipeline_chunks!r}"
            )

    def schedule(self, hosts: int | Sequence[Sequence[int]]) -> Schedule:
        """Ranks stand in the trees from left to right host after host: most branches stay inside a host."""
        ranks = [rank for host in as_hosts(hosts) for rank in host]
        k = self.num_pipeline_chunks
        first, second = pair_of_trees(len(ranks))
        halves = (first, range(k)), (second, range(k, 2 * k))
        rounds = side_by_side(_pipeline(ranks, parents, chunks) for parents, chunks in halves)
        return Schedule(len(ranks), 2 * k, tuple(rounds))


def tree(num_pipeline_chunks: int = 8) -> Tree:
    """A double binary tree: best for many ranks and data of middling size.

    Each tree carries half of the data, cut into `num_pipeline_chunks`: more of them keep all levels busy,
    and cost two rounds each.

    >>> len(tree(num_pipeline_chunks=2).schedule(8).rounds)
    8
    """
    return Tree(num_pipeline_chunks)


def pair_of_trees(n: int) -> tuple[Parents, Parents]:
    """Two binary trees over positions 0 to n − 1; no position has children in both.

    >>> pair_of_trees(4)
    ((1, None, 3, 1), (2, 0, None, 2))
    """
    first: list[int | None] = [None] * n
    _add_subtree(first, range(n), None)
    moved = [n - 1 - p if n % 2 == 0 else (p + 1) % n for p in range(n)]
    second: list[int | None] = [None] * n
    for position, parent in enumerate(first):
        second[moved[position]] = None if parent is None else moved[parent]
    return tuple(first), tuple(second)


def _add_subtree(parents: list[int | None], positions: range, above: int | None) -> None:
    """Hang the positions under `above`: the middle odd one on top, so that only odd ones have children."""
    if not positions:
        return
    inner = positions[1::2]
    top = inner[(len(inner) - 1) // 2] if inner else positions[0]
    parents[top] = above
    _add_subtree(parents, range(positions.start, top), top)
    _add_subtree(parents, range(top + 1, positions.stop), top)


def _pipeline(ranks: Sequence[int], parents: Parents, chunks: range) -> list[Round]:
    depths = [_depth(parents, position) for position in range(len(parents))]
    height = max(depths)
    edges = [(p, parent, depths[p]) for p, parent in enumerate(parents) if parent is not None]
    times = range(height + len(chunks) - 1) if edges else range(0)
    up = [
        tuple(
            Transfer(ranks[p], ranks[parent], chunks[t - (height - depth)], add=True)
            for p, parent, depth in edges
            if 0 <= t - (height - depth) < len(chunks)
        )
        for t in times
    ]
    down = [
        tuple(
            Transfer(ranks[parent], ranks[p], chunks[t - (depth - 1)], add=False)
            for p, parent, depth in edges
            if 0 <= t - (depth - 1) < len(chunks)
        )
        for t in times
    ]
    return up + down


def _depth(parents: Parents, position: int) -> int:
    parent = parents[position]
    return 0 if parent is None else 1 + _depth(parents, parent)
