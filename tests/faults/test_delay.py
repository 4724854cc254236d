"""A rank that is alive but does not come, or comes no more by its own will."""

from __future__ import annotations

from collections.abc import Callable

from nursery import Event, Scene

Play = Callable[..., Scene]
Survivors = Callable[..., list[Event]]

SOON = {"timeout": 3.0, "warn_after": 1.0}


# Scenes that mostly wait for a bound go on at once.


def test_a_stalled_rank_is_named_with_what_it_does(play: Play, survivors: Survivors) -> None:
    points = {"in_forward": "computing", "after_bucket": "backward", "before_header": "synchronizing"}
    raised = play(1, "in_backward", "raise", guard=SOON, stall_after="Injected")
    scenes = [play(2, point, "stall", guard=SOON) for point in points]
    for scene, doing in zip(scenes, points.values(), strict=True):
        for rank, error in zip([0, 1, 3], survivors(scene, 2, "SyncTimeout"), strict=True):
            assert f"rank 2 (pid {scene.pids[2]}) is alive but still {doing} in step 2" in error["text"]
            warned = [event for event in scene.events(rank, "warned") if "has waited" in event["text"]]
            assert len(warned) == 1
            assert f"is alive but still {doing} in step 2" in warned[0]["text"]
            assert warned[0]["at"] < error["at"]
    for error in survivors(raised, 1, "SyncTimeout"):  # it went no further
        assert "is alive but still backward in step 2" in error["text"]


def test_a_rank_that_raised_and_exited_is_named(play: Play, survivors: Survivors) -> None:
    points = {"in_backward": "left", "after_bucket": "failed"}
    scenes = [play(1, point, "raise") for point in points]
    for scene, how in zip(scenes, points.values(), strict=True):
        for error in survivors(scene, 1):
            assert f"{how} in step 2" in error["text"]


def test_ctrl_c_ends_a_wait_and_the_others_learn_of_it(play: Play, survivors: Survivors) -> None:
    scene = play(2, "waiting", "interrupt")
    for error in survivors(scene, 2):
        assert "failed in step 2" in error["text"]
    [struck], [error] = scene.events(3, "act"), scene.events(2, "raised")
    assert error["kind"] == "KeyboardInterrupt"
    assert error["at"] - struck["at"] < 5  # the wait itself would last 20 s
    assert error["grads"] == []
    assert scene.end()[2] == 0


def test_ranks_that_just_end_do_not_disturb_each_other(play: Play) -> None:
    """Nobody detaches: who is first through the last step exits while others are still in it."""
    scene = play(0, "never", "kill")
    scene.wait([0, 1, 2, 3], 40)
    assert [len(scene.events(rank, "finished")) for rank in range(4)] == [1] * 4, scene.text()
    assert scene.end() == [0] * 4, scene.text()


def test_an_error_that_all_ranks_share_is_not_mistaken_for_a_loss(play: Play) -> None:
    """The first to raise says that it gave up and exits, while others still wait for their last bucket."""
    scene = play(0, "never", "kill", guard={"nonfinite": "raise"}, poisoned=1)
    scene.wait([0, 1, 2, 3], 40)
    errors = [event for rank in range(4) for event in scene.events(rank, "raised")]
    assert [error["kind"] for error in errors] == ["NonFinite"] * 4, scene.text()
    assert all("rank 1 has NaN or Inf" in error["text"] for error in errors)
    assert scene.end() == [0] * 4, scene.text()
