"""Continuing from a saved state is the uninterrupted run, through every saver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import gradsync as gs
from gradsync.compress.recipe import Compressor
from models import mlp
from resumption import RICH, Run, heard

SMALL, LARGE = 1024, 1 << 20
COMPRESSORS: dict[str, Compressor] = {
    "int8": gs.int8(),
    "int4 stochastic": gs.int4(block=32, rounding="stochastic", seed=7),
    "sign": gs.sign(),
    "topk": gs.topk(0.05),
    "randomk": gs.randomk(0.1),
    "powersgd": gs.powersgd(rank=2),
    "warmup": gs.warmup(gs.int8(), 6),
    "by_parameter": gs.by_parameter([gs.rule(dims=1, compress=gs.sign()), gs.rule("2.*", compress=gs.powersgd(2))]),
}


# Continuing


def check_continuation(plan: gs.Plan, resumed: gs.Plan, cut: int, total: int) -> None:
    whole, second = Run(plan), Run(resumed)
    whole.train(range(cut))
    second.copy(whole)
    state = whole.sync.state_dict()
    whole.train(range(cut, total))  # the state shares no memory with the run, which goes on
    assert heard(lambda: second.sync.load_state_dict(state)) == []
    second.train(range(cut, total))
    second.assert_equals(whole)
    for each in (whole, second):
        each.sync.detach()


@pytest.mark.parametrize("resumed_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_continuing_is_the_uninterrupted_run(name: str, resumed_bytes: int, run: Callable[..., Any]) -> None:
    plan = gs.Plan(compress=COMPRESSORS[name], bucket_bytes=SMALL)
    run(check_continuation, plan, gs.Plan(compress=COMPRESSORS[name], bucket_bytes=resumed_bytes), 4, 8)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_run_saved_before_compression_began_continues_too(cut: int, run: Callable[..., Any]) -> None:
    run(check_continuation, RICH, RICH, cut, 4)


def test_a_window_goes_on_in_its_middle(run: Callable[..., Any]) -> None:
    plan = gs.Plan(compress=gs.int8(), pace=gs.accumulate(3))
    run(check_continuation, plan, plan, 7, 12)


def check_weight_in_window() -> None:
    plan, runs = gs.Plan(pace=gs.accumulate(2)), []
    for resumes in (False, True):
        each = Run(plan)
        each.sync.set_batch_weight(1 + dist.get_rank())
        each.train(range(1))
        if resumes:
            again = Run(plan)
            again.copy(each)
            again.sync.load_state_dict(each.sync.state_dict())
            each.sync.detach()
            each = again
        each.train(range(1, 2))
        runs.append(each)
    runs[0].assert_equals(runs[1])
    for each in runs:
        each.sync.detach()


def test_a_batch_weight_counts_for_the_rest_of_its_window(run: Callable[..., Any]) -> None:
    run(check_weight_in_window)


# Savers


def by_torch(run: Run, fresh: Run, folder: str) -> None:
    file = f"{folder}/{dist.get_rank()}.pt"
    torch.save(run.sync.state_dict(), file)
    fresh.sync.load_state_dict(torch.load(file, weights_only=True))


def by_safetensors(run: Run, fresh: Run, folder: str) -> None:
    file = f"{folder}/{dist.get_rank()}.safetensors"
    save_file(run.sync.state_dict(), file)
    fresh.sync.load_state_dict(load_file(file))


def by_dcp(run: Run, fresh: Run, folder: str) -> None:
    dcp.save({"sync": run.sync}, checkpoint_id=f"{folder}/dcp")
    dcp.load({"sync": fresh.sync}, checkpoint_id=f"{folder}/dcp")


def by_one_file(run: Run, fresh: Run, folder: str) -> None:
    state = run.sync.state_dict(all_ranks=True)
    assert bool(state) == (dist.get_rank() == 0)
    if state:
        torch.save(state, f"{folder}/all.pt")
    dist.barrier()
    fresh.sync.load_state_dict(torch.load(f"{folder}/all.pt", weights_only=True))


def by_one_reader(run: Run, fresh: Run, folder: str) -> None:
    """Only rank 0 reads and brings anything."""
    fresh.sync.load_state_dict(run.sync.state_dict(all_ranks=True))


def by_a_neighbour(run: Run, fresh: Run, folder: str) -> None:
    """Ranks came to other hosts, and each finds another one's file there."""
    torch.save(run.sync.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    file = f"{folder}/{(dist.get_rank() + 1) % dist.get_world_size()}.pt"
    fresh.sync.load_state_dict(torch.load(file, weights_only=True))


SAVERS = {
    saver.__name__: saver for saver in (by_torch, by_safetensors, by_dcp, by_one_file, by_one_reader, by_a_neighbour)
}


def check_saver(saver: str, plan: gs.Plan, cut: int, folder: str) -> None:
    whole, first, second = Run(plan), Run(plan), Run(plan)
    whole.train(range(9))
    first.train(range(cut))
    second.copy(first)
    assert heard(lambda: SAVERS[saver](first, second, folder)) == []
    first.assert_equals(second)
    second.train(range(cut, 9))
    second.assert_equals(whole)
    for each in (whole, first, second):
        each.sync.detach()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("saver", SAVERS)
def test_every_saver_keeps_the_state(saver: str, ranks: int, run: Callable[..., Any], tmp_path: Path) -> None:
    run(check_saver, saver, RICH, 5, str(tmp_path), ranks=ranks)


@pytest.mark.parametrize("saver", sorted(SAVERS.keys() - {"by_dcp"}))
def test_every_other_saver_keeps_an_open_window(saver: str, run: Callable[..., Any], tmp_path: Path) -> None:
    run(check_saver, saver, gs.Plan(pace=gs.accumulate(3)), 5, str(tmp_path))


class Lookup(torch.nn.Module):
    """Its embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 8, sparse=True)
        self.head = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x.abs().mul(10).long() % 9).mean(1))


def check_sparse_window(folder: str) -> None:
    runs = [Run(gs.Plan(pace=gs.accumulate(3)), Lookup) for _ in range(2)]
    x = torch.arange(48.0).view(6, 8) + dist.get_rank()
    runs[0].model(x).sum().backward()
    by_safetensors(runs[0], runs[1], folder)
    for each in runs:
        each.model(x).sum().backward()
        each.model(x + 1).sum().backward()
    for mine, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad.to_dense(), theirs.grad.to_dense())
    for each in runs:
        each.sync.detach()


def test_hidden_sparse_gradients_are_saved_too(run: Callable[..., Any], tmp_path: Path) -> None:
    run(check_sparse_window, str(tmp_path))


def lose_window(folder: str) -> list[str]:
    plan = gs.Plan(pace=gs.accumulate(3))
    first, second = Run(plan), Run(plan)
    first.train(range(5))
    found = heard(lambda: by_dcp(first, second, folder))
    assert not second.sync.mid_window
    for each in (first, second):
        each.sync.detach()
    return found


def test_a_window_that_dcp_left_out_begins_anew_with_a_warning(run: Callable[..., Any], tmp_path: Path) -> None:
    first, others = run(lose_window, str(tmp_path))
    assert len(first) == 1
    assert "2 backward calls after its beginning, and their gradients are lost" in first[0]
    assert others == []


class Branches(torch.nn.Module):
    """A batch goes through one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 1, bias=False)
        self.b = torch.nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        branches = {"a": self.a, "b": self.b}
        return branches[branch](x)


def resume_in_window(combine: Any, window: str) -> None:
    plan = gs.Plan(pace=gs.accumulate(4), combine=combine)
    runs = [Run(plan, Branches) for _ in range(2)]

    def train(runs: list[Run], branches: str, start: int) -> None:
        for each in runs:
            for batch, branch in enumerate(branches, start):
                each.model(torch.full((2, 3), 1.0 + batch + 10 * dist.get_rank()), branch).sum().backward()
                each.optimizer.step()
                each.optimizer.zero_grad()

    train(runs[:1], "abab" + window[:2], 0)
    runs[1].copy(runs[0])
    runs[1].sync.load_state_dict(runs[0].sync.state_dict())
    train(runs, window[2:], 6)
    runs[1].assert_equals(runs[0])
    for tensor in runs[1].model.state_dict().values():
        assert torch.equal(tensor, gs.all_reduce(tensor.clone()))
    for each in runs:
        each.sync.detach()


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("window", ["abab", "aabb"])
def test_a_resumed_window_averages_what_it_held(combine: str, window: str, run: Callable[..., Any]) -> None:
    """Also where no later batch of the window goes through the same parameters."""
    run(resume_in_window, combine, window)


class Refuses(torch.nn.Linear):
    """Its backward raises where it is told to."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.armed:
            out.register_hook(self._refuse)
        return out.clone()

    def _refuse(self, grad: torch.Tensor) -> None:
        raise ArithmeticError("a user's own exception")


def save_inside(what: str) -> tuple[list[str], list[float]]:
    """In a window of accumulate(3) gradients stand in `.grad` just now, with more than they had."""
    runs = [Run(gs.Plan(pace=gs.accumulate(3)), lambda: Refuses(2, 1)) for _ in range(2)]
    first, second = runs
    first.model(torch.ones(1, 2)).sum().backward()
    state: dict[str, torch.Tensor] = {}
    if what == "no_sync":
        with first.sync.no_sync():
            first.model(torch.ones(1, 2)).sum().backward()
        state = first.sync.state_dict()
    else:
        first.model.armed = True
        try:
            first.model(torch.ones(1, 2)).sum().backward()
        except ArithmeticError:
            state = first.sync.state_dict()
    found = heard(lambda: second.sync.load_state_dict(state))
    second.optimizer.zero_grad()
    for batch in range(3):
        assert second.sync.mid_window == (batch > 0)
        second.model(torch.full((1, 2), float(batch))).sum().backward()
    assert second.model.weight.grad is not None
    grad = second.model.weight.grad.flatten().tolist()
    for each in runs:
        each.sync.detach()
    return found, grad


@pytest.mark.parametrize("what", ["no_sync", "raised"])
def test_what_a_backward_adds_to_just_now_is_said_to_be_lost(what: str, run: Callable[..., Any]) -> None:
    (found, first), (others, second) = run(save_inside, what)
    assert len(found) == 1
    assert "1 backward calls after its beginning, and their gradients are lost" in found[0]
    assert others == []
    assert first == second == [1.0, 1.0]


def weigh_by_hand(saved: bool) -> list[float]:
    """What a window by hand holds is the user's, and is not saved: nor are its weights."""
    run = Run(gs.Plan(), lambda: torch.nn.Linear(1, 1, bias=False))
    if saved:
        for weight in (2.0, 7.0):
            run.sync.set_batch_weight(weight)
            with run.sync.no_sync():
                run.model(torch.ones(1, 1)).sum().backward()
        run.sync.load_state_dict(run.sync.state_dict())
        run.optimizer.zero_grad()
    run.sync.set_batch_weight(1.0 + dist.get_rank())
    run.model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    assert run.model.weight.grad is not None
    grad = run.model.weight.grad.flatten().tolist()
    run.sync.detach()
    return list(grad)


def test_the_weights_of_a_window_by_hand_go_with_it(run: Callable[..., Any]) -> None:
    assert run(weigh_by_hand, True) == run(weigh_by_hand, False)
