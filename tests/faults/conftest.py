"""One nursery for all scenes, and a way to play one to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nursery import Nursery, Scene

Begin = Callable[..., Scene]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def begin(nursery: Nursery, tmp_path: Path) -> Iterator[Begin]:
    """`begin("plays:train", fault=…, guard=…)`: a scene, whose processes are ended with the test."""
    scenes: list[Scene] = []

    def begin_scene(play: str, ranks: int = 4, **arguments: object) -> Scene:
        scenes.append(nursery.begin(play, tmp_path / f"scene-{len(scenes)}", ranks, **arguments))
        return scenes[-1]

    yield begin_scene
    for scene in scenes:
        scene.end()
