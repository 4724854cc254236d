"""The state of a run: continuing from it is the uninterrupted run, through every saver, and nothing unsent is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from test_transparency import mlp, plain_step
from yardstick import Context, assert_replicas_equal

import gradsync as gs
from gradsync.compress.choice import Compressor
from gradsync.engine.checkpoint import Arrangement, Part, Saved, Shared, fitting, flatten, read
from gradsync.engine.handover import Claim, deal

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
RICH = gs.Plan(compress=COMPRESSORS["by_parameter"], bucket_bytes=SMALL)


class Run:
    """A model in training, its data a function of rank and step."""

    def __init__(self, plan: gs.Plan, build: Callable[[], torch.nn.Module] = mlp) -> None:
        torch.manual_seed(3)
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sync = gs.attach(self.model, self.optimizer, plan)

    def train(self, steps: range) -> None:
        ctx = Context("gradsync", self.model, self.model, [self.optimizer], self.sync, dist.get_rank())
        for ctx.step in steps:
            ctx.generator.manual_seed(1000 * ctx.rank + ctx.step)
            plain_step(ctx)

    def copy(self, other: Run) -> None:
        """Weights and optimizer; the rest is ours."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))

    def assert_equals(self, other: Run) -> None:
        theirs = other.model.state_dict()
        for name, tensor in self.model.state_dict().items():
            assert torch.equal(tensor, theirs[name]), f"{name} differs after resuming"
        mine, state = self.sync.state_dict(), other.sync.state_dict()
        assert mine.keys() == state.keys()
        for key in state:
            assert torch.equal(mine[key].nan_to_num(), state[key].nan_to_num()), f"{key} differs after resuming"


def heard(call: Callable[[], Any]) -> list[str]:
    """What is warned of during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def union(folder: str, names: str = "*") -> dict[str, torch.Tensor]:
    """All these files as one state."""
    state: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob(f"{names}.pt")):
        state |= torch.load(file, weights_only=True)
    return state


def residual_sums(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Over all ranks in this state, by parameter."""
    sums: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        if ".residual." in key:
            name = key.split(".residual.")[1]
            sums[name] = sums.get(name, torch.zeros_like(tensor, dtype=torch.float64)) + tensor.double()
    return sums


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


# Other numbers of ranks


def save_local(plan: gs.Plan, folder: str) -> None:
    run = Run(plan)
    run.train(range(4))
    torch.save(run.sync.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    run.sync.detach()


def load_all(plan: gs.Plan, folder: str, bring: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """All ranks' state right after loading, then with what one step without any gradient has applied."""
    run = Run(plan)
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


@pytest.mark.parametrize("bring", ["everywhere", "on rank 0"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (4, 2), (2, 2)])
def test_another_number_of_ranks_owes_the_same(
    before: int, after: int, bring: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    run(save_local, RICH, str(tmp_path), ranks=before)
    (loaded, found), *_ = run(load_all, RICH, str(tmp_path), bring, ranks=after)
    owed, sums = residual_sums(union(str(tmp_path))), residual_sums(loaded)
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
def test_a_lost_file_is_a_residual_of_zero_and_a_warning(ranks: int, run: Callable[..., Any], tmp_path: Path) -> None:
    run(save_local, RICH, str(tmp_path), ranks=ranks)
    outcomes = run(lose_a_file, RICH, str(tmp_path), ranks=ranks)
    for rank, (loaded, found) in enumerate(outcomes):
        assert [f"nobody brings the state of rank 1 of {ranks}" in each for each in found] == [True] * (rank == 0)
        saved = union(str(tmp_path), str(rank))
        for key in saved:
            if rank != 1 or f"gradsync.rank{rank}." not in key:
                assert torch.equal(loaded[key].nan_to_num(), saved[key].nan_to_num()), key
            elif ".residual." in key:
                assert not loaded[key].any(), key


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


# Pure


def test_shapes_say_nothing_of_values() -> None:
    """What torch.distributed.checkpoint needs: a template fits every state of its model and plan."""
    names = ["0.weight", "0.bias", "é"]
    young = Shared(0, 2, 1.0, 0, "int8", Arrangement(names, [], False))
    old = Shared(10**9, 2, 2.0**40, 3, "by_parameter" * 9, Arrangement(names[::-1], names[1:2], True))
    a, b = (flatten(Saved(shared, {}, {})) for shared in (young, old))
    assert [(key, tensor.shape, tensor.dtype) for key, tensor in a.items()] == [
        (key, tensor.shape, tensor.dtype) for key, tensor in b.items()
    ]


def test_reading_undoes_flattening() -> None:
    shapes = {"a.weight": (2, 3), "b": (1,)}
    shared = Shared(7, 3, 0.5, 2, fitting("x" * 1000), Arrangement(["b", "a.weight"], ["b"], True))
    part = Part({"a.weight": torch.rand(2, 3)}, {"b": torch.rand(1)}, 1, 2.5)
    again = read(flatten(Saved(shared, {"a.weight": torch.rand(3, 2)}, {2: part})), shapes)
    assert again is not None
    assert again.shared == shared
    assert again.parts[2].weight == 2.5
    assert torch.equal(again.parts[2].residuals["a.weight"], part.residuals["a.weight"])
    assert torch.equal(again.parts[2].hidden["b"], part.hidden["b"])
    assert not again.parts[2].torn


def claims(brings: list[list[int]], before: int, keeps: list[int]) -> list[Claim]:
    """Who brings which old ranks' parts, and how many residuals each keeps now."""
    return [
        Claim(None, "same" if parts else None, 4, before, dict.fromkeys(map(str, parts), 1), False, count)
        for parts, count in zip(brings, keeps, strict=True)
    ]


@pytest.mark.parametrize("before", range(1, 6))
@pytest.mark.parametrize("after", range(1, 6))
def test_every_part_goes_to_one_rank(before: int, after: int) -> None:
    everything = list(range(before))
    for brings in ([everything] * after, [everything] + [[]] * (after - 1)):
        hand = deal(claims(brings, before, [1] * after))
        assert [each.old for each in hand.deals] == everything
        assert [each.owner for each in hand.deals] == [old % after for old in everything]
        assert all(each.old in brings[each.source] for each in hand.deals)
        assert hand.lost == []
        assert hand.whole == (before == after)


def test_a_residual_goes_to_a_rank_that_compresses() -> None:
    """Across hosts the first rank of each host alone does: ranks 0 and 2 of 4 here."""
    hand = deal(claims([[0], [1], [2], [3]], 4, [5, 0, 5, 0]))
    assert [each.owner for each in hand.deals] == [0, 2, 2, 2]
    assert not hand.whole
