"""Ranks that cannot see each other's processes: heartbeats through the store."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nursery import Event, Scene

Play = Callable[..., Scene]
Survivors = Callable[..., list[Event]]


@pytest.mark.parametrize(
    "faults",
    [
        [(1, "in_forward", "kill", False), (3, "after_bucket", "stop", False), (2, "in_backward", "kill", True)],
        # Rank 0 keeps the store: with it every other rank's heartbeat is out of reach as well.
        [(0, "in_forward", "kill", True), (0, "before_header", "stop", True)],
    ],
    ids=["another", "who keeps the store"],
)
def test_a_rank_of_another_host_is_named(
    play: Play, survivors: Survivors, faults: list[tuple[int, str, str, bool]]
) -> None:
    """Scenes at once, since silence is noticed only after a while."""
    scenes = [play(victim, point, act, remote=True, tcp=tcp) for victim, point, act, tcp in faults]
    for scene, (victim, *_) in zip(scenes, faults, strict=True):
        for error in survivors(scene, victim):
            assert f"rank {victim} gives no sign of life" in error["text"]


def test_a_stalled_rank_of_another_host_is_late_not_lost(play: Play, survivors: Survivors) -> None:
    scene = play(3, "in_forward", "stall", remote=True, tcp=True, guard={"timeout": 4.0})
    for error in survivors(scene, 3, "SyncTimeout"):
        assert "rank 3 is alive but still computing in step 2" in error["text"]


def test_a_rank_of_another_host_that_ends_is_named(play: Play, survivors: Survivors) -> None:
    for error in survivors(play(1, "in_backward", "raise", remote=True), 1):
        assert "rank 1 left in step 2" in error["text"]
