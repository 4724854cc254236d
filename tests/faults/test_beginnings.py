"""A rank that is killed, stopped or late while groups and connections are made: it is named, and nobody waits on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Event, Nursery, Scene

GUARD = {"timeout": 40.0, "dead_after": 1.5}
_HANG_S = 20.0  # below the timeout: what only the timeout ends is a hang

Begin = Callable[..., Scene]


@pytest.fixture
def begin(nursery: Nursery, tmp_path: Path) -> Iterator[Begin]:
    """`begin(what, point, act, …)`: three ranks by default, of which rank 1 is the victim."""
    scenes: list[Scene] = []

    def start(what: str, point: str, act: str = "kill", victim: int = 1, ranks: int = 3, **arguments: Any) -> Scene:
        guard = GUARD | arguments.pop("guard", {})
        folder = tmp_path / f"scene-{len(scenes)}"
        arguments |= {"what": what, "victim": victim, "point": point, "act": act, "guard": guard}
        scenes.append(nursery.begin("beginnings:begin", folder, ranks, **arguments))
        return scenes[-1]

    yield start
    for scene in scenes:
        scene.end()


def named(scene: Scene, kind: str = "PeerLost", victim: int = 1) -> list[Event]:
    """The errors of the others, after checking that they came, named the victim and let the process end."""
    size = len(scene.pids)
    others = [rank for rank in range(size) if rank != victim]
    scene.wait(others, 60)
    [act] = scene.events(victim, "act")
    errors = []
    for rank in others:
        [error] = scene.events(rank, "raised")
        assert error["kind"] == kind, scene.text()
        assert error["ranks"] in ([victim], None), scene.text()
        assert error["text"].startswith(f"[rank {rank}/{size}"), scene.text()
        assert f"rank {victim} " in error["text"], scene.text()
        assert error["threads"] == [], scene.text()
        assert error["at"] - act["at"] < _HANG_S, scene.text()
        assert scene.ended_at(rank) - error["at"] < _HANG_S, scene.text()
        errors.append(error)
    codes = scene.end()
    assert {codes[rank] for rank in others} == {0}, scene.text()
    return errors


@pytest.mark.parametrize("point", ["sight", "set", "wait", "get", "agreed"])
def test_a_rank_killed_inside_attach_is_named(begin: Begin, point: str) -> None:
    """At "sight" the others may have seen its record, but not mapped its page."""
    for error in named(begin("attach", point)):
        assert "died in step 0" in error["text"] or ("ended before all had met" in error["text"] and point == "sight")


def test_a_rank_killed_with_some_connections_made_is_named(begin: Begin) -> None:
    for time, tcp in [(2, True), (3, False)]:
        named(begin("attach", "get", time=time, tcp=tcp))


def test_the_rank_that_keeps_the_store_is_named(begin: Begin) -> None:
    for point in ["sight", "wait"]:
        named(begin("attach", point, victim=0, tcp=True), victim=0)


def test_who_finds_no_store_names_the_rank_that_keeps_it(begin: Begin) -> None:
    """Rank 2 comes when rank 0 has been killed and rank 1 has raised: it has not seen a single record."""
    *_, error = named(begin("attach", "come", victim=0, tcp=True, last=2), victim=0)
    assert "the store in which the ranks meet was lost in attach" in error["text"]


@pytest.mark.parametrize("what", ["again", "switch"])
@pytest.mark.parametrize("point", ["met", "wait"])
def test_who_is_known_already_is_named_even_before_it_came(begin: Begin, what: str, point: str) -> None:
    named(begin(what, point))


@pytest.mark.parametrize(
    ("what", "time", "remote"),
    [("gossip", 2, False), ("async_sgd", 2, False), ("across_hosts", 2, True), ("all_reduce", 1, False)],
)
def test_every_other_group_of_ours_is_looked_after(begin: Begin, what: str, time: int, remote: bool) -> None:
    """`set` is called once for each group, here for the last of them."""
    named(begin(what, "set", time=time, remote=remote, tcp=remote))


def test_a_group_of_the_backend_is_looked_after(begin: Begin) -> None:
    named(begin("backend", "wait"))


@pytest.mark.parametrize("point", ["sight", "wait"])
def test_a_rank_stopped_inside_attach_is_named(begin: Begin, point: str) -> None:
    scenes = [begin("attach", point, "stop", remote=remote, tcp=True) for remote in [False, True]]
    for scene in scenes:
        for error in named(scene):
            assert "gives no sign of life" in error["text"]


def test_a_rank_killed_on_another_host_is_named(begin: Begin) -> None:
    for error in named(begin("attach", "wait", remote=True, tcp=True)):
        assert "gives no sign of life" in error["text"]


def test_a_store_that_is_lost_is_a_rank_that_died_and_one_that_is_mute_is_not(begin: Begin) -> None:
    """Rank 0 keeps it, and is on another host: of its end its connection tells, of a stop nothing does."""
    killed = begin("attach", "wait", victim=0, remote=True, tcp=True)
    stopped = begin("attach", "wait", "stop", victim=0, remote=True, tcp=True, guard={"timeout": 6.0})
    named(killed, victim=0)
    stopped.wait([1, 2], 60)
    for rank in [1, 2]:
        [error] = stopped.events(rank, "raised")
        assert (error["kind"], error["ranks"]) == ("SyncTimeout", []), stopped.text()
        assert "the store in which the ranks meet does not answer" in error["text"]


def test_who_comes_last_does_not_blame_only_those_who_noticed(begin: Begin) -> None:
    """Rank 0 has raised and ended when rank 2 comes: its record may be there, and rank 1's is."""
    scene = begin("attach", "come", last=2)
    scene.wait([0, 2], 60)
    for rank in [0, 2]:
        [error] = scene.events(rank, "raised")
        assert (error["kind"], error["ranks"] in ([1], [0, 1])) == ("PeerLost", True), scene.text()
    assert scene.events(0, "raised")[0]["ranks"] == [1], scene.text()
    scene.end()


def test_who_notices_last_hears_whom_the_keeper_of_the_store_lost(begin: Begin) -> None:
    """Rank 0 ends when it has raised, and the store with it."""
    named(begin("attach", "wait", remote=True, tcp=True, patient=2))


def test_a_rank_that_lives_and_does_not_come_is_late(begin: Begin) -> None:
    late = {"timeout": 4.0}
    scenes = [begin("attach", point, "stall", guard=late) for point in ["met", "sight"]]
    for scene, text in zip(scenes, ["rank 1 did not come", "rank 1 came and went no further"], strict=True):
        for error in named(scene, "SyncTimeout"):
            assert text in error["text"]


@pytest.mark.parametrize("point", ["met", "sight", "wait"])
def test_ctrl_c_is_heard_inside_attach(begin: Begin, point: str) -> None:
    scene = begin("attach", point, "stall", interrupted=0)
    scene.wait([0], 60)
    [act], [error] = scene.events(1, "act"), scene.events(0, "raised")
    assert (error["kind"], error["threads"]) == ("KeyboardInterrupt", [])
    assert error["at"] - act["at"] < _HANG_S
    assert scene.end()[0] == 0


@pytest.mark.parametrize(
    ("victim", "point"),
    [(1, "sight"), (2, "merge"), (3, "sight"), (4, "mapped"), (4, "sight"), (5, "sight"), (5, "wait")],
)
def test_a_rank_killed_among_blocks_of_ranks_is_named_in_all_blocks(begin: Begin, victim: int, point: str) -> None:
    """Six ranks in three blocks, each on a host of its own; ranks 0, 2 and 4 speak for their blocks."""
    named(begin("attach", point, victim=victim, ranks=6, block=2, remote=True, tcp=True), victim=victim)


@pytest.mark.parametrize("victim", [1, 4])
def test_a_rank_killed_among_blocks_of_one_host_is_named(begin: Begin, victim: int) -> None:
    for point in ["merge", "sight"]:
        named(begin("attach", point, victim=victim, ranks=6, block=2), victim=victim)


@pytest.mark.parametrize("point", ["merge", "sight"])
def test_the_rank_that_keeps_the_store_is_named_in_all_blocks(begin: Begin, point: str) -> None:
    named(begin("attach", point, victim=0, ranks=6, block=2, tcp=True), victim=0)


def test_a_rank_that_does_not_come_is_named_in_all_blocks(begin: Begin) -> None:
    cases = [(2, "met", "did not come"), (5, "met", "did not come"), (4, "merge", "came and"), (3, "sight", "came and")]
    arguments: dict[str, Any] = {"ranks": 6, "block": 2, "guard": {"timeout": 8.0}}
    scenes = [begin("attach", point, "stall", victim=victim, **arguments) for victim, point, _ in cases]
    for scene, (victim, _, what) in zip(scenes, cases, strict=True):
        for error in named(scene, "SyncTimeout", victim):
            assert f"rank {victim} {what}" in error["text"]


@pytest.mark.parametrize("point", ["sight", "forming", "formed"])
def test_a_rank_killed_inside_init_is_named(begin: Begin, point: str) -> None:
    for error in named(begin("init", point), "LaunchError"):
        assert "group did not form because rank 1 died or fell silent" in error["text"]


def test_a_rank_killed_while_the_ranks_exchange_their_addresses_is_named(begin: Begin) -> None:
    for error in named(begin("init", "seat"), "LaunchError"):
        assert "rank 1 ended while the ranks met" in error["text"]
