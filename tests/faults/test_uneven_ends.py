"""A rank that has no more batches while others have: all hear of it in one sentence, which names `sync.join()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nursery import Nursery, Scene

import gradsync as gs
from gradsync.engine.exit_notice import going_on

BATCHES = [4, 2, 4]
JOIN = "if ranks have unequally many batches, train inside `with sync.join():` on every rank"

Begin = Callable[..., Scene]


@pytest.fixture
def begin(nursery: Nursery, tmp_path: Path) -> Begin:
    def begin_scene(how: str, remote: bool) -> Scene:
        return nursery.begin("plays:run_out", tmp_path / how, 3, batches=BATCHES, how=how, remote=remote)

    return begin_scene


def _said(scene: Scene, ranks: list[int]) -> list[tuple[str, str]]:
    scene.wait(ranks, 60)
    events = [scene.events(rank, "raised") for rank in ranks]
    assert all(len(each) == 1 for each in events), scene.text()
    return [(each["kind"], each["text"]) for [each] in events]


@pytest.mark.parametrize("remote", [False, True], ids=["one host", "several hosts"])
def test_who_detaches_and_who_goes_on_hear_the_same_sentence(begin: Begin, remote: bool) -> None:
    scene = begin("detach", remote)
    said = _said(scene, [0, 1, 2])
    assert said == [said[0]] * 3, scene.text()
    assert said[0][0] == "Disagreement"
    assert said[0][1].startswith(f"rank 0 is in a synchronization but rank 1 is in detach(); {JOIN}")
    scene.end()


@pytest.mark.parametrize("remote", [False, True], ids=["one host", "several hosts"])
def test_who_ends_is_said_to_have_ended_by_itself(begin: Begin, remote: bool) -> None:
    scene = begin("exit", remote)
    for kind, text in _said(scene, [0, 2]):
        assert kind == "PeerLost"
        assert "rank 1" in text
        assert (
            f"in step 2, while this rank was in bucket 0 (bias, weight). The step cannot be completed. It ended by "
            f"itself: {JOIN}" in text
        ), scene.text()
        assert "restart all ranks" not in text
    scene.wait([1], 20)
    if not remote:
        assert f"[rank 1/3 step 2] this rank ends, but ranks 0 and 2 would go on: {JOIN}" in scene.text()
    scene.end()


def test_who_ends_by_an_exception_did_not_run_out_of_batches(begin: Begin) -> None:
    scene = begin("error", False)
    for kind, text in _said(scene, [0, 2]):
        assert kind == "PeerLost"
        assert "failed in step 2" in text
        assert "restart all ranks" in text
        assert "join" not in text
    assert "would go on" not in scene.text()
    scene.end()


def _frozen(sync: gs.GradSync, model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    model(torch.randn(2, 3, requires_grad=True)).sum().backward()  # the generator's backward in a GAN


def _derived(sync: gs.GradSync, model: torch.nn.Module) -> None:
    torch.autograd.grad(model(torch.randn(2, 3)).sum(), list(model.parameters()))


def _unsynchronized(sync: gs.GradSync, model: torch.nn.Module) -> None:
    with sync.no_sync():
        _backward(sync, model)


def _backward(sync: gs.GradSync, model: torch.nn.Module) -> None:
    model(torch.randn(2, 3)).sum().backward()


def _seen_after(name: str) -> tuple[list[int], str]:
    """Who would go on, and where the neighbour is, after a backward that nobody else has to come to."""
    act, plan = BY_THEMSELVES[name]
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, plan)
    act(sync, model)
    dist.barrier()
    views = sync._lane.liveness.peer_views()
    seen = going_on(views, sync._lane.step), str(views[1 - dist.get_rank()].state.phase)
    dist.barrier()
    sync.detach()
    return seen


BY_THEMSELVES: dict[str, tuple[Callable[[gs.GradSync, torch.nn.Module], None], gs.Plan]] = {
    "frozen": (_frozen, gs.Plan()),
    "autograd.grad": (_derived, gs.Plan()),
    "no_sync": (_unsynchronized, gs.Plan()),
    "window": (_backward, gs.Plan(pace=gs.accumulate(2))),
    "local_sgd": (_backward, gs.Plan(pace=gs.local_sgd(2))),
}


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_a_backward_that_synchronizes_nothing_leaves_nobody_in_a_step(run: Callable[..., Any], name: str) -> None:
    assert run(_seen_after, name) == [([], "computing")] * 2
