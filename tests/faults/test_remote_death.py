"""Ranks that cannot see each other's processes: heartbeats along the tree of hosts."""

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


@pytest.mark.parametrize(
    "faults",
    # 0 ── 1 ── 3 ─┬─ 2      two hosts come together on each level, and another one listens to them
    #              └─ 4 ── 5
    [[(3, "kill"), (4, "stop")], [(1, "stop"), (3, "stop")], [(0, "kill"), (5, "kill")]],
    ids=lambda faults: " ".join(f"{act}-{victim}" for victim, act in faults),
)
def test_the_news_goes_through_the_tree_and_around_who_died(
    play: Play, survivors: Survivors, faults: list[tuple[int, str]]
) -> None:
    guard = {"dead_after": 3.0}
    scenes = [play(victim, "in_forward", act, ranks=6, remote=True, fan_out=2, guard=guard) for victim, act in faults]
    for scene, (victim, _) in zip(scenes, faults, strict=True):
        for error in survivors(scene, victim):
            assert f"rank {victim} gives no sign of life" in error["text"]


@pytest.mark.parametrize("act", ["kill", "stop"])
def test_a_rank_among_several_of_its_host_is_named_by_other_hosts(play: Play, survivors: Survivors, act: str) -> None:
    """Ranks 0 and 1 speak for their hosts; 2 and 3 are heard through them."""
    scenes = {victim: play(victim, "in_backward", act, hosts=2) for victim in [1, 2]}
    for victim, scene in scenes.items():
        for rank, error in zip([rank for rank in range(4) if rank != victim], survivors(scene, victim), strict=True):
            speaks_itself = victim == 1 and rank != 3
            died = act == "kill" and not speaks_itself
            assert ("died in step 2" if died else "gives no sign of life") in error["text"]


@pytest.mark.parametrize("act", ["kill", "stop"])
def test_of_two_hosts_the_other_is_named(play: Play, survivors: Survivors, act: str) -> None:
    """Nobody else is heard: that the network passes, the kernel knows."""
    for error in survivors(play(1, "in_forward", act, ranks=2, remote=True, tcp=True), 1):
        assert "rank 1 gives no sign of life" in error["text"]
