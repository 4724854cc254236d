"""A rank that dies, stops or does not come while others add up in shared memory: they say so, and exit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Event, Nursery, Scene

from conftest import GUARD

Survivors = Callable[..., list[Event]]
Reduce = Callable[..., Scene]

SMALL, LARGE = 1000, 4_000_000


@pytest.fixture
def reduce(nursery: Nursery, tmp_path: Path) -> Iterator[Reduce]:
    """`reduce(victim, point, act, …)`: the scene of that fault; its processes are ended with the test."""
    scenes: list[Scene] = []

    def begin(rank: int, point: str, act: str, **arguments: Any) -> Scene:
        fault = {"rank": rank, "point": point, "act": act}
        guard = GUARD | arguments.pop("guard", {})
        folder = tmp_path / f"scene-{len(scenes)}"
        scenes.append(nursery.begin("plays:reduce", folder, fault=fault, guard=guard, **arguments))
        return scenes[-1]

    yield begin
    for scene in scenes:
        scene.end()


@pytest.mark.parametrize(
    ("point", "victim", "by", "shared", "numel"),
    [
        ("before_post", 1, "worker", True, LARGE),
        ("before_post", 0, "all_reduce", False, SMALL),
        ("posted", 0, "worker", False, SMALL),  # rank 0's memory holds the counters
        ("posted", 2, "all_reduce", True, LARGE),
        ("adding", 1, "worker", True, LARGE),
        ("adding", 0, "worker", False, LARGE),
        ("adding", 3, "all_reduce", True, LARGE),
    ],
)
def test_a_rank_that_is_killed_is_named_by_all_others(
    reduce: Reduce, survivors: Survivors, point: str, victim: int, by: str, shared: bool, numel: int
) -> None:
    scene = reduce(victim, point, "kill", by=by, shared=shared, numel=numel)
    for error in survivors(scene, victim):
        # Who had given all it had in step 2 may be missed only in step 3.
        assert error["step"] in ({2} if point == "before_post" else {2, 3})
        assert f"rank {victim} (pid {scene.pids[victim]}) died in step " in error["text"]
        assert "The step cannot be completed" in error["text"]


def test_a_rank_that_is_stopped_is_lost_after_a_while(reduce: Reduce, survivors: Survivors) -> None:
    scenes = {
        1: reduce(1, "posted", "stop", by="worker", shared=False, numel=SMALL),
        0: reduce(0, "adding", "stop", by="worker", shared=True, numel=LARGE),
        3: reduce(3, "adding", "stop", by="worker", shared=False, numel=LARGE),
    }
    for victim, scene in scenes.items():
        for error in survivors(scene, victim):
            assert "gives no sign of life, last seen " in error["text"]


def test_a_rank_that_never_comes_is_late(reduce: Reduce, survivors: Survivors) -> None:
    guard = {"timeout": 3.0, "warn_after": 1.0}
    scene = reduce(2, "before_post", "stall", by="worker", shared=True, numel=LARGE, guard=guard)
    for error in survivors(scene, 2, "SyncTimeout"):
        assert f"rank 2 (pid {scene.pids[2]}) is alive but still " in error["text"]
        assert "waited " in error["text"]


def test_ctrl_c_ends_a_wait_for_a_sum_and_the_others_learn_of_it(reduce: Reduce, survivors: Survivors) -> None:
    ways = [("all_reduce", False), ("worker", True)]
    for scene in [reduce(1, "posted", "interrupt", by=by, shared=shared, numel=LARGE) for by, shared in ways]:
        survivors(scene, 1)
        [error] = scene.events(1, "raised")
        assert error["kind"] == "KeyboardInterrupt"
        assert scene.end()[1] == 0


def test_a_forked_child_that_keeps_the_memory_mapped_hides_nothing(reduce: Reduce, survivors: Survivors) -> None:
    scene = reduce(3, "before_post", "kill", by="worker", shared=True, numel=LARGE, workers=1)
    try:
        survivors(scene, 3)
    finally:
        for pid in scene.events(3, "workers")[0]["pids"]:
            os.kill(pid, signal.SIGKILL)


def test_without_a_fault_every_sum_is_made_and_all_exit(reduce: Reduce) -> None:
    scene = reduce(0, "never", "kill", by="worker", shared=True, numel=LARGE)
    scene.wait([0, 1, 2, 3], 40)
    assert [len(scene.events(rank, "finished")) for rank in range(4)] == [1] * 4, scene.text()
    assert scene.end() == [0] * 4, scene.text()
