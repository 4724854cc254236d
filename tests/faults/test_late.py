"""Late is not dead: an interpreter that is held, and a job that was stopped as a whole and goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from injector import until
from nursery import Scene

Play = Callable[..., Scene]


def finished(scene: Scene) -> None:
    scene.wait([0, 1, 2, 3], 50)
    assert [len(scene.events(rank, "finished")) for rank in range(4)] == [1] * 4, scene.text()
    assert scene.end() == [0] * 4, scene.text()


def test_a_held_interpreter_is_late_not_lost(play: Play) -> None:
    """By shared memory, and with another rank of its host that speaks for it to those of other hosts."""
    scenes = [
        play(1, "in_forward", "hold", guard={"warn_after": 3.0}),
        play(3, "before_header", "hold"),
        play(1, "in_backward", "hold", hosts=2, tcp=True),
        play(0, "after_bucket", "hold", hosts=2, tcp=True),
    ]
    for scene in scenes:
        finished(scene)
    for rank in [0, 2, 3]:
        warned = [event["text"] for event in scenes[0].events(rank, "warned") if "has waited" in event["text"]]
        assert len(warned) == 1, scenes[0].text()
        assert f"rank 1 (pid {scenes[0].pids[1]}) is alive but its interpreter has been held for" in warned[0]


def test_the_only_rank_of_its_host_vouches_for_itself_past_its_interpreter(play: Play) -> None:
    """Rank 0 is the root of the tree, and keeps the store."""
    guard = {"warn_after": 3.0}
    scenes = [play(victim, "in_forward", "hold", remote=True, tcp=True, guard=guard) for victim in (0, 1)]
    for victim, scene in enumerate(scenes):
        finished(scene)
        neighbour = 1 - victim
        [warned] = [event["text"] for event in scene.events(neighbour, "warned") if "has waited" in event["text"]]
        assert f"rank {victim} is alive but its interpreter has been held for" in warned


def test_a_job_that_was_stopped_as_a_whole_goes_on(play: Play) -> None:
    """Stopped while three ranks wait, for longer than their timeout and than dead_after: on one host, and on four."""
    guard = {"timeout": 6.0, "dead_after": 3.0}
    scenes = [play(2, "in_forward", "pause", guard=guard, **where) for where in ({}, {"remote": True, "tcp": True})]
    for scene in scenes:
        until(lambda scene=scene: bool(scene.events(2, "act")))
        for rank in range(4):
            scene.kill(rank, signal.SIGSTOP)
    stopped_for(8.0)
    for scene in scenes:
        for rank in range(4):
            scene.kill(rank, signal.SIGCONT)
        scene.tell(2, "go")
    for scene in scenes:
        finished(scene)


def stopped_for(seconds: float) -> None:
    """How long a job stands still is what this is about: nothing else can be waited for."""
    threading.Event().wait(seconds)
