"""A rank that dies, stops or differs while gradients travel compressed: every other rank says so, and exits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nursery import Event, Scene

import gradsync as gs
from gradsync.compress.recipe import Compressor
from gradsync.compress.toml import canonical

Play = Callable[..., Scene]
Survivors = Callable[..., list[Event]]

INT8, POWERSGD = canonical(gs.int8()), canonical(gs.powersgd(2))
ACROSS = canonical(gs.across_hosts(gs.int8()))


@pytest.mark.parametrize(
    ("compress", "point", "act", "victim"),
    [
        (INT8, "after_bucket", "kill", 1),
        (INT8, "before_header", "stop", 0),
        (POWERSGD, "after_bucket", "kill", 3),  # P of some buckets is under way, and no Q
        (POWERSGD, "waiting", "kill", 2),
        (POWERSGD, "in_backward", "stop", 1),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else str(value),
)
def test_survivors_name_the_rank_and_can_detach(
    play: Play, survivors: Survivors, compress: dict[str, Any], point: str, act: str, victim: int
) -> None:
    for error in survivors(play(victim, point, act, compress=compress, after="detach"), victim):
        became = "died" if act == "kill" else "gives no sign of life"
        assert f"rank {victim} " in error["text"]
        assert became in error["text"]
        assert "while this rank was in " in error["text"]


def test_a_rank_of_another_host_is_named(play: Play, survivors: Survivors) -> None:
    """Scenes at once, since silence is noticed only after a while."""
    faults = [(INT8, "kill"), (POWERSGD, "stop"), (ACROSS, "kill")]
    scenes = [play(2, "after_bucket", act, compress=each, remote=True, after="detach") for each, act in faults]
    for scene in scenes:
        for error in survivors(scene, 2):
            assert "rank 2 gives no sign of life" in error["text"]


def attach_differently(first: Compressor | None, second: Compressor | None) -> str:
    plan = gs.Plan(compress=second if dist.get_rank() == 1 else first)
    with pytest.raises(gs.Disagreement) as caught:
        gs.attach(torch.nn.Linear(4, 4), plan=plan)
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [(gs.int8(), None), (gs.int8(), gs.int8(block=512)), (gs.powersgd(2), gs.warmup(gs.powersgd(2), 5))],
    ids=["none", "another block", "another warm-up"],
)
def test_other_compressors_on_other_ranks_are_refused_alike_at_attach(
    first: Compressor | None, second: Compressor | None, run: Callable[..., Any]
) -> None:
    said = run(attach_differently, first, second, ranks=3)
    assert said == [said[0]] * 3
    assert "compress" in said[0]
    assert "rank 1" in said[0]
