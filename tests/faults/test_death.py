"""A rank that is killed or stopped, at every point of a step: every other rank says so, and exits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from injector import POINTS
from nursery import Event, Scene

Play = Callable[..., Scene]
Survivors = Callable[..., list[Event]]

VICTIMS = [1, 0, 3]
KILLED = {point: VICTIMS[i % 3] for i, point in enumerate(POINTS)}
STOPPED = {point: VICTIMS[(i + 1) % 3] for i, point in enumerate(POINTS[::2])}
# Where the victim had given all it had, the others may have finished the step before they met its absence.
LATE_POINTS = {"before_wait", "waiting", "after_sync", "in_step"}


@pytest.mark.parametrize(("point", "victim"), KILLED.items())
def test_survivors_of_a_death_name_the_rank_the_step_and_the_bucket(
    play: Play, survivors: Survivors, point: str, victim: int
) -> None:
    check_survivors(survivors(play(victim, point, "kill"), victim), point, "died", victim)


def test_survivors_of_a_stop_name_the_rank_the_step_and_the_bucket(play: Play, survivors: Survivors) -> None:
    """At once, since who stops is found out only after a while."""
    scenes = {point: play(victim, point, "stop") for point, victim in STOPPED.items()}
    for point, victim in STOPPED.items():
        check_survivors(survivors(scenes[point], victim), point, "gives no sign of life", victim)


def check_survivors(errors: list[Event], point: str, became: str, victim: int) -> None:
    for error in errors:
        assert error["step"] in ({2, 3} if point in LATE_POINTS else {2})
        assert re.search(rf"rank {victim} \(pid \d+\) {became}.* in step [23], while this rank was in ", error["text"])
        in_flight = r"bucket \d \(\d\.bias, \d\.weight\)"
        if point in LATE_POINTS | {"before_header"}:
            in_flight += "|the step header"  # every bucket may have come through
        assert re.search(f"while this rank was in ({in_flight})", error["text"])


def test_the_first_bucket_that_did_not_come_through_is_named(play: Play, survivors: Survivors) -> None:
    for error in survivors(play(2, "in_backward", "kill"), 2):
        assert error["text"].startswith(f"[rank {error['text'][6]}/4 step 2 bucket 0]")
        assert "bucket 0 (3.bias, 3.weight)" in error["text"]


def test_a_forked_worker_that_keeps_the_sockets_open_does_not_hide_a_death(play: Play, survivors: Survivors) -> None:
    scene = play(3, "in_forward", "kill", workers=1)
    try:
        survivors(scene, 3)
    finally:
        for pid in scene.events(3, "workers")[0]["pids"]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("together", [False, True], ids=["one-after-the-other", "in-one-backward"])
def test_two_models_in_one_process(play: Play, survivors: Survivors, together: bool) -> None:
    survivors(play(2, "in_backward", "kill", models=2, together=together), 2)


def test_who_reported_is_never_blamed(play: Play, survivors: Survivors) -> None:
    """Rank 1 looks only when rank 2 was killed and ranks 0 and 3 have given up and exited."""
    survivors(play(2, "in_backward", "kill", last=1), 2)


def test_cleaning_up_after_an_error_does_not_hang(play: Play, survivors: Survivors) -> None:
    for scene in [play(2, "in_backward", "stop", after=after) for after in ("detach", "destroy")]:
        survivors(scene, 2)


def test_a_rank_that_wakes_up_too_late_learns_that_it_was_given_up(play: Play) -> None:
    scene = play(1, "in_forward", "stop")
    scene.wait([0, 2, 3], 40)
    scene.kill(1, signal.SIGCONT)
    scene.wait([1], 40)
    [error] = scene.events(1, "raised")
    assert (error["kind"], error["ranks"], error["grads"]) == ("SyncTimeout", [1], [])
    assert "the others gave up waiting for this rank" in error["text"]
    assert scene.end() == [0, 0, 0, 0], scene.text()
