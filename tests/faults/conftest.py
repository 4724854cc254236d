"""One nursery for all scenes, and what every survivor of a fault must have seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Event, Nursery, Scene

# Detection within the bound is PeerLost; what only the timeout catches is SyncTimeout, and a hang is longer still:
# the groups themselves give up 30 s after the timeout.
GUARD = {"timeout": 20.0, "dead_after": 1.5}
_HANG_S = 15.0

Play = Callable[..., Scene]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def play(nursery: Nursery, tmp_path: Path) -> Iterator[Play]:
    """`play(victim, point, act, …)`: the scene of that fault; its processes are ended with the test."""
    scenes: list[Scene] = []

    def begin(rank: int, point: str, act: str, ranks: int = 4, last: int = -1, **arguments: Any) -> Scene:
        fault = {"rank": rank, "point": point, "act": act, "last": last}
        guard = GUARD | arguments.pop("guard", {})
        folder = tmp_path / f"scene-{len(scenes)}"
        scenes.append(nursery.begin("plays:train", folder, ranks, fault=fault, guard=guard, **arguments))
        return scenes[-1]

    yield begin
    for scene in scenes:
        scene.end()


@pytest.fixture
def survivors() -> Callable[..., list[Event]]:
    """`survivors(scene, victim)`: each survivor's error, after checking what holds for all of them."""

    def check(scene: Scene, victim: int, kind: str = "PeerLost") -> list[Event]:
        ranks = [rank for rank in range(len(scene.pids)) if rank != victim]
        scene.wait(ranks, 40)
        acts = [event["at"] for rank in range(len(scene.pids)) for event in scene.events(rank, "act")]
        errors = []
        for rank in ranks:
            [error] = scene.events(rank, "raised")
            assert (error["kind"], error["ranks"]) == (kind, [victim]), scene.text()
            assert error["text"].startswith(f"[rank {rank}/{len(scene.pids)} step {error['step']}"), scene.text()
            assert f"rank {victim} " in error["text"], scene.text()
            assert error["grads"] == [], scene.text()
            assert error["at"] - acts[0] < _HANG_S, scene.text()
            assert scene.ended_at(rank) - error["at"] < _HANG_S, scene.text()
            errors.append(error)
        codes = scene.end()
        assert [codes[rank] for rank in ranks] == [0] * len(ranks), scene.text()
        return errors

    return check
