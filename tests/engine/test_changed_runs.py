"""A run continues with other ranks, without a file, with another compressor; with another model it does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradsync as gs
from gradsync.compress.recipe import Compressor
from gradsync.launch.spawn import RankPool
from resumption import RICH, Run, heard, residual_sums, union
from yardstick import assert_replicas_equal

# Other numbers of ranks


def save_local(plan: gs.Plan, folder: str) -> None:
    run = Run(plan)
    run.train(range(4))
    torch.save(run.sync.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    dcp.save(run.sync.state_dict(), checkpoint_id=f"{folder}/dcp")
    run.sync.detach()


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """`saved(ranks)`: the folder in which so many ranks have saved; each number trains once."""

    @cache
    def save(ranks: int) -> str:
        folder = str(tmp_path_factory.mktemp(f"of-{ranks}-ranks"))
        pool.run(save_local, RICH, folder, ranks=ranks)
        return folder

    return save


def everything_in_dcp(folder: str) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(f"{folder}/dcp").read_metadata().state_dict_metadata
    state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in metadata.items()}  # type: ignore[union-attr]
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    return state


def load_all(plan: gs.Plan, folder: str, bring: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """All ranks' state right after loading, then with what one step without any gradient has applied."""
    run = Run(plan)
    if bring == "by dcp":
        state = everything_in_dcp(folder)
    else:
        state = union(folder) if bring == "everywhere" or dist.get_rank() == 0 else {}
    found = heard(lambda: run.sync.load_state_dict(state))
    loaded = run.sync.state_dict(all_ranks=True)
    if dist.get_world_size() > 1:
        (run.model(torch.zeros(2, 8)) * 0).sum().backward()
        sums = residual_sums(run.sync.state_dict(all_ranks=True))
        for name, param in run.model.named_parameters():
            if name in sums:
                assert param.grad is not None
                before = residual_sums(loaded)[name]
                torch.testing.assert_close(sums[name] + param.grad.double(), before, rtol=1e-5, atol=1e-7)
    run.sync.detach()
    return loaded, found


@pytest.mark.parametrize("bring", ["everywhere", "on rank 0", "by dcp"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (4, 2), (2, 2)])
def test_another_number_of_ranks_owes_the_same(
    before: int, after: int, bring: str, run: Callable[..., Any], saved: Callable[[int], str]
) -> None:
    (loaded, found), *_ = run(load_all, RICH, saved(before), bring, ranks=after)
    owed, sums = residual_sums(union(saved(before))), residual_sums(loaded)
    assert owed.keys() == sums.keys()
    assert any(bool(tensor.any()) for tensor in owed.values())
    for name in owed:
        torch.testing.assert_close(sums[name], owed[name], rtol=1e-6, atol=1e-9)
    if after == 1:
        assert "alone compresses nothing" in found[0]
    else:
        assert found == []


def lose_a_file(plan: gs.Plan, folder: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    run = Run(plan)
    state = None if dist.get_rank() == 1 else union(folder, str(dist.get_rank()))
    found = heard(lambda: run.sync.load_state_dict(state))
    loaded = run.sync.state_dict()
    run.train(range(4, 6))
    assert_replicas_equal(run.model)
    run.sync.detach()
    return loaded, found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_lost_file_is_a_residual_of_zero_and_a_warning(
    ranks: int, run: Callable[..., Any], saved: Callable[[int], str]
) -> None:
    outcomes = run(lose_a_file, RICH, saved(ranks), ranks=ranks)
    for rank, (loaded, found) in enumerate(outcomes):
        assert [f"nobody brings the state of rank 1 of {ranks}" in each for each in found] == [True] * (rank == 0)
        file = union(saved(ranks), str(rank))
        for key in file:
            if rank != 1 or f"gradsync.rank{rank}." not in key:
                assert torch.equal(loaded[key].nan_to_num(), file[key].nan_to_num()), key
            elif ".residual." in key:
                assert not loaded[key].any(), key


def save_files(plan: gs.Plan, folder: str, steps: range) -> None:
    run = Run(plan)
    run.train(steps)
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "sync": run.sync.state_dict()}
    torch.save(state, f"{folder}/rank{dist.get_rank()}.pt")
    run.sync.detach()


def load_as_the_page_says(plan: gs.Plan, folder: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    page = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()
    block = re.search(r"### Fewer ranks, or more.*?```python\n(.*?)```", page, re.DOTALL)
    assert block is not None
    run = Run(plan)
    names = {"torch": torch, "dist": dist, "folder": Path(folder), "rank": dist.get_rank()}
    names |= {"model": run.model, "optimizer": run.optimizer, "sync": run.sync}
    found = heard(lambda: exec(block[1], names))
    loaded = run.sync.state_dict(all_ranks=True)
    run.train(range(4, 6))
    assert_replicas_equal(run.model)
    run.sync.detach()
    return loaded, found


@pytest.mark.parametrize("plan", [RICH, gs.Plan()], ids=["compressed", "exact"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 2), (2, 4), (2, 3)])
def test_the_page_hands_over_the_files_of_any_number_of_ranks(
    plan: gs.Plan, before: int, after: int, run: Callable[..., Any], tmp_path: Path
) -> None:
    run(save_files, plan, str(tmp_path), range(2), ranks=4)  # an older run leaves files of more ranks behind
    run(save_files, plan, str(tmp_path), range(4), ranks=before)
    files = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)["sync"] for rank in range(before)]
    (loaded, found), *others = run(load_as_the_page_says, plan, str(tmp_path), ranks=after)
    assert found == []
    assert all(said == [] for _, said in others)
    owed, sums = residual_sums({key: each for file in files for key, each in file.items()}), residual_sums(loaded)
    assert owed.keys() == sums.keys()
    for name in owed:
        torch.testing.assert_close(sums[name], owed[name], rtol=1e-6, atol=1e-9)


def load_own_files(plan: gs.Plan, folder: str, stale: str) -> tuple[str, list[str]]:
    run = Run(plan)
    rank = dist.get_rank()
    state = torch.load(f"{folder}/rank{rank}.pt", weights_only=True)["sync"]
    if stale == "united" and rank == 1:
        state |= torch.load(f"{folder}/rank3.pt", weights_only=True)["sync"]
    said, found = "", []
    try:
        found = heard(lambda: run.sync.load_state_dict(state))
    except (ValueError, gs.Disagreement) as error:
        said = str(error)
    run.sync.detach()
    return said, found


@pytest.mark.parametrize("plan", [RICH, gs.Plan()], ids=["compressed", "exact"])
def test_stale_files_are_told_of_in_one_sentence(plan: gs.Plan, run: Callable[..., Any], tmp_path: Path) -> None:
    run(save_files, plan, str(tmp_path), range(2), ranks=4)
    run(save_files, plan, str(tmp_path), range(4), ranks=2)
    said = [text for text, _ in run(load_own_files, plan, str(tmp_path), "own", ranks=4)]
    assert set(said) == {said[0]}
    assert (
        "of step 4, saved by 2 ranks, on ranks 0 and 1; that of step 2, saved by 4 ranks, on ranks 2 and 3" in said[0]
    )
    said = [text for text, _ in run(load_own_files, plan, str(tmp_path), "united", ranks=2)]
    assert set(said) == {said[0]}
    assert "rank 1 cannot load its state: this state is made of files of different steps: " in said[0]


@pytest.mark.parametrize("compresses", [False, True])
def test_ranks_that_are_gone_are_missed_only_if_they_kept_anything(
    compresses: bool, run: Callable[..., Any], tmp_path: Path
) -> None:
    plan = gs.Plan(compress=gs.int8() if compresses else None)
    run(save_files, plan, str(tmp_path), range(3), ranks=4)
    (said, found), (_, other) = run(load_own_files, plan, str(tmp_path), "own", ranks=2)
    assert said == ""
    assert other == []
    assert ["nobody brings the state of ranks 2 and 3 of 4" in each for each in found] == [True] * compresses


# Other plans and models


def change_compressor(before: gs.Plan, after: gs.Plan) -> tuple[list[str], bool]:
    first, second = Run(before), Run(after)
    first.train(range(4))
    second.copy(first)
    found = heard(lambda: second.sync.load_state_dict(first.sync.state_dict()))
    owed, taken = residual_sums(first.sync.state_dict()), residual_sums(second.sync.state_dict())
    same = all(torch.equal(owed[name], taken[name]) for name in owed)
    second.train(range(4, 6))
    assert_replicas_equal(second.model)
    for each in (first, second):
        each.sync.detach()
    return found, same


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (gs.int8(), gs.int4(), ['"kind": "int8"']),
        (gs.powersgd(2), gs.powersgd(1), ['"rank": 2']),
        (gs.powersgd(2), gs.topk(0.1), ['"kind": "powersgd"']),
        (gs.int8(), None, ['"kind": "int8"', "6 parameters with a residual, 0.bias among them, are not compressed"]),
        (None, gs.int8(), []),
    ],
)
def test_another_compressor_takes_over_what_was_not_sent(
    before: Compressor | None, after: Compressor | None, says: list[str], run: Callable[..., Any]
) -> None:
    (found, same), (others, _) = run(change_compressor, gs.Plan(compress=before), gs.Plan(compress=after))
    assert same
    assert len(found) == len(says)
    assert all(word in each for word, each in zip(says, found, strict=True))
    assert others == []


def narrow() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def slim() -> torch.nn.Module:
    """The names of `mlp`, in other shapes."""
    return torch.nn.Sequential(*(layer for n in (8, 16, 16) for layer in (torch.nn.Linear(8, n), torch.nn.Tanh())))


def load_what_does_not_fit() -> list[str]:
    first, second, third = Run(RICH), Run(RICH, narrow), Run(RICH, slim)
    state, errors = first.sync.state_dict(), []
    halves = {key: tensor for key, tensor in state.items() if key != "gradsync.order"}
    old = {"format": 1, "step": 3, "order": []}
    for run, bad in ((second, state), (third, state), (first, old), (first, {"x": state}), (first, halves)):
        with pytest.raises(ValueError) as caught:
            run.sync.load_state_dict(bad)
        errors.append(str(caught.value))
    with pytest.raises(ValueError, match="an empty state on every rank"):
        first.sync.load_state_dict({})
    with pytest.raises(gs.GradSyncError if dist.get_rank() else ValueError, match="has format 1") as caught:
        first.sync.load_state_dict(state if dist.get_rank() else old)
    for bad in ("rank0.pt", state | {"gradsync.order": "0.weight"}):  # on one rank: the others do not wait for it
        with pytest.raises(gs.GradSyncError if dist.get_rank() else ValueError, match="rank 0 cannot") as caught:
            first.sync.load_state_dict(state if dist.get_rank() else bad)  # type: ignore[arg-type]
        errors.append(str(caught.value))
    first.sync.load_state_dict(state)  # nothing has changed, and nobody is stuck
    first.train(range(1))
    for run in (first, second, third):
        run.sync.detach()
    return errors


def test_what_does_not_fit_is_refused_on_every_rank(run: Callable[..., Any]) -> None:
    for errors in run(load_what_does_not_fit):
        assert "another model: it does not agree about the parameters ['4.bias', '4.weight']" in errors[0]
        assert "another model: it has a residual of shape" in errors[1]
        assert "this state has format 1, this gradsync reads 2" in errors[2]
        assert "this state has no format" in errors[3]
        assert "not whole: 'gradsync.order' is not in it" in errors[4]
        assert "a state is a dict of tensors, got str; pass what sync.state_dict() returned" in errors[5]
        assert "gradsync.order must be a tensor, got '0.weight'" in errors[6]


def freeze_and_thaw() -> None:
    run = Run(gs.Plan(compress=gs.sign()))
    run.train(range(4))
    weight = run.model.get_parameter("2.weight")
    weight.requires_grad_(False)
    run.train(range(4, 5))  # once more it travels: all ranks must hear of it first
    before = run.sync.residuals()["2.weight"]
    assert before.any()
    run.train(range(5, 7))
    assert torch.equal(run.sync.residuals()["2.weight"], before)
    weight.requires_grad_(True)
    run.train(range(7, 9))
    assert not torch.equal(run.sync.residuals()["2.weight"], before)
    run.sync.detach()


def test_the_residual_of_a_frozen_parameter_waits_until_it_is_thawed(run: Callable[..., Any]) -> None:
    run(freeze_and_thaw)
