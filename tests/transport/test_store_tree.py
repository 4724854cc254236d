"""How ranks hear each other through a store: with real stores, turn by turn."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from gradsync.transport.store_tree import BLOCK, StoreTree


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "tcp":
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return HashStore() if request.param == "hash" else FileStore(str(tmp_path / "store"), 1)


def go_through(walks: dict[int, Generator[Any, None, Any]], most: int = 50) -> dict[int, Any]:
    """What each comes to, when all go on in turns; who still waits after `most` turns is left out."""
    ends: dict[int, Any] = {}
    for _ in range(most):
        for rank in [rank for rank in walks if rank not in ends]:
            try:
                next(walks[rank])
            except StopIteration as end:
                ends[rank] = end.value
    return ends


def chained(parts: list[bytes]) -> bytes:
    return json.dumps([each for part in parts for each in json.loads(part)]).encode()


@given(st.integers(1, 200), st.integers(2, BLOCK), st.integers(0, 1))
def test_everybody_hears_what_all_say_in_the_order_of_ranks(size: int, block: int, from_level: int) -> None:
    store = HashStore()
    trees = [StoreTree(store, rank, size, block) for rank in range(size)]
    assert [rank for tree in trees if tree.block.leader == tree.rank for rank in tree.block.members] == list(
        range(size)
    )
    assert all(len(subgroup.members) <= block for tree in trees for subgroup in tree.subgroups)
    says = {tree.rank: [tree.rank] if from_level == 0 else list(tree.block.members) for tree in trees}
    walks = {
        tree.rank: tree.merge("x", json.dumps(says[tree.rank]).encode(), chained, from_level=from_level)
        for tree in trees
    }
    ends = go_through(walks)
    assert ends.keys() == set(range(size))
    assert {bytes(end) for end in ends.values()} == {json.dumps(list(range(size))).encode()}


def test_a_whole_block_is_heard_on_every_kind_of_store(store: Store) -> None:
    """The last of 64 ranks has the sign of the number for its bit."""
    heard: dict[int, dict[int, bytes]] = {rank: {} for rank in range(BLOCK)}
    trees = [StoreTree(store, rank, BLOCK) for rank in range(BLOCK)]
    walks: dict[int, Any] = {
        rank: tree.take("x", tree.block, b"%d" % rank, heard[rank].update) for rank, tree in enumerate(trees)
    }
    assert go_through(walks).keys() == set(range(BLOCK))
    for rank in range(BLOCK):
        assert heard[rank] == {other: b"%d" % other for other in range(BLOCK) if other != rank}


def test_what_was_taken_back_can_be_said_again(store: Store) -> None:
    size = 2 * BLOCK
    trees = [StoreTree(store, rank, size) for rank in range(size)]
    for tree in trees:
        tree.tell("x", tree.block, b"first")
    assert trees[0].said("x") == list(range(size))
    back = [0, 5, BLOCK - 1, size - 1]
    for rank in back:
        trees[rank].take_back()
    assert trees[1].said("x") == [rank for rank in range(size) if rank not in back]
    missing, holding, left = trees[1].laggards("x")
    assert (missing, holding, left) == ([], [BLOCK], back)
    for rank in back:
        StoreTree(store, rank, size).tell("x", trees[rank].block, b"again")
    assert trees[1].said("x") == list(range(size))
    assert trees[1].laggards("x") == ([], [0, BLOCK], [])


def test_who_says_it_twice_counts_once(store: Store) -> None:
    """A rank that was started again under the same prefix: only its last word is heard."""
    for word in [b"old", b"new"]:
        tree = StoreTree(store, 1, 3)
        tree.tell("x", tree.block, word)
    other = StoreTree(store, 0, 3)
    heard: dict[int, bytes] = {}
    walk: Any = other.take("x", other.block, b"", heard.update)
    assert next(walk).ranks == [2]
    assert heard == {1: b"new"}
    assert other.said("x") == [0, 1]


@given(st.integers(1, 150), st.integers(2, 12), st.data())
def test_whoever_is_missing_is_found_by_everybody(size: int, block: int, data: st.DataObject) -> None:
    absent = data.draw(st.sets(st.integers(0, size - 1), max_size=5))
    store = HashStore()
    trees = {rank: StoreTree(store, rank, size, block) for rank in range(size)}
    walks = {rank: tree.merge("x", b"[]", chained, from_level=0) for rank, tree in trees.items() if rank not in absent}
    ends = go_through(walks)
    assert bool(ends) == (not absent)
    for tree in trees.values():
        late = tree.laggards("x")
        assert set(late.missing) == absent
        if absent:
            assert not late.left


def test_a_block_has_2_to_64_ranks() -> None:
    for block in [1, 65]:
        with pytest.raises(ValueError, match=f"2 to 64 ranks, got {block}"):
            StoreTree(HashStore(), 0, 4, block)
