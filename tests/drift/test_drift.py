"""Replicas that drift apart are found within 64 steps, named, and repaired or not, as the guard says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drift_cases import Flip, Mixed, Told, random_flip, train
from torch import nn

import gradsync as gs

WITHIN = 64


def flip_many(seeds: list[int], policy: Any) -> list[Told]:
    results = []
    for seed in seeds:
        at, rank = random.Random(seed).randrange(1, 40), seed % dist.get_world_size()
        guard = gs.Guard(drift=policy)
        results.append(train(random_flip(seed), at, rank, at + WITHIN + 1, guard, still_after=at))
    return results


def test_bit_flips_at_random_places_are_all_found_and_named(run: Any) -> None:
    seeds = list(range(8))
    for told in run(flip_many, seeds, "warn", ranks=3):
        for seed, each in zip(seeds, told, strict=True):
            flip = random_flip(seed)
            ((step, what, ranks, parameter, count, text),) = each.lines
            at = random.Random(seed).randrange(1, 40)
            assert (what, ranks, parameter, count) == ("drift", [seed % 3], flip.parameter, 1), (seed, flip, text)
            assert at < step <= at + WITHIN, (seed, flip)
            name = f'{flip.key} of parameter "{flip.parameter}"' if flip.key else f'parameter "{flip.parameter}"'
            assert text.startswith(f"element {flip.index(Mixed())} of {name} is "), (seed, flip, text)
            assert text.endswith(f" on rank {seed % 3}"), text
            assert len(each.warned) == 1, "once, though it stays"
            assert "the replicas differ: " + text in each.warned[0]
            assert each.stats["drift_findings"] == 1


def flip_and_compare(flip: Flip, clean: bool) -> Told:
    return train(None if clean else flip, 5, 2, 70, gs.Guard(drift="repair"), still_after=None)


@pytest.mark.parametrize(
    "flip", [Flip("fp32", "", 100, 30), Flip("fp64", "exp_avg_sq", 3, 62), Flip("fp16", "exp_avg", 7, 14)], ids=str
)
def test_a_repaired_replica_is_bit_equal_to_an_undisturbed_run(flip: Flip, run: Any) -> None:
    disturbed, clean = run(flip_and_compare, flip, False, ranks=3), run(flip_and_compare, flip, True, ranks=3)
    assert {told.digest for told in disturbed} == {clean[0].digest}
    for told in disturbed:
        assert told.whats == ["drift", "repair"]
        assert all(ranks == [2] for _, _, ranks, *_ in told.lines)
        assert "Repaired from the other ranks" in told.warned[0]


def happen(what: str, policy: Any, ranks: Any = None) -> Told:
    def happening(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        if what == "lr":
            opt.param_groups[0]["lr"] = 0.5
        elif what == "state":
            del opt.state[model.fp32]
        elif what == "everything":
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(2)
        elif what == "swap":
            model.fp32.data[[3, 4]] = model.fp32.data[[4, 3]]

    return train(happening, 5, 1, 70, gs.Guard(drift=policy), still_after=5)


@pytest.mark.parametrize(("ranks", "way"), [(2, "sync.broadcast()"), (3, 'gs.Guard(drift="repair")')])
def test_the_way_out_is_one_that_works(ranks: int, way: str, run: Any) -> None:
    """Of two replicas that differ nobody can tell which is right, and a repair would raise."""
    for told in run(happen, "lr", "warn", ranks=ranks):
        assert way in told.warned[0]


def test_a_learning_rate_that_differs_is_named_before_what_it_causes(run: Any) -> None:
    for told in run(happen, "lr", "warn", ranks=3):
        ((_, what, ranks, parameter, _, text),) = told.lines
        assert (what, ranks, parameter) == ("drift", [1], None)
        assert text == "lr of group 0 of AdamW is 0.01 on ranks 0 and 2 but 0.5 on rank 1"


def test_state_that_is_missing_on_a_rank_is_a_difference_and_is_made_again(run: Any) -> None:
    told = run(happen, "state", "repair", ranks=3)
    assert len({each.digest for each in told}) == 1
    for each in told:
        assert each.whats == ["drift", "repair"]
        assert each.lines[0][5] == (
            'exp_avg of parameter "fp32" is float32[23, 11] on ranks 0 and 2 but missing on rank 1 (2 more differ)'
        )


def test_missing_state_is_told_once_and_not_in_every_step(run: Any) -> None:
    for told in run(happen, "state", "warn", ranks=3):
        assert told.whats == ["drift"]
        assert len(told.warned) == 1


def test_a_whole_replica_that_differs_is_one_finding(run: Any) -> None:
    told = run(happen, "everything", "repair", ranks=3)
    assert len({each.digest for each in told}) == 1
    for each in told:
        assert [(what, count) for _, what, _, _, count, _ in each.lines] == [("drift", 5), ("repair", 5)]
        assert " (4 more differ)" in each.lines[0][5]


def test_exchanged_rows_are_found(run: Any) -> None:
    for told in run(happen, "swap", "warn", ranks=3):
        assert told.lines[0][5].startswith('element [3, 0] of parameter "fp32" is ')


def test_raise_is_the_same_error_on_every_rank_and_leaves_no_gradient(run: Any) -> None:
    told = run(happen, "everything", "raise", ranks=3)
    assert len({each.raised for each in told}) == 1
    assert told[0].raised.startswith('Disagreement: the replicas differ: element [0, 0] of parameter "fp32" is ')
    assert told[0].raised.endswith(". Restart all ranks from the last checkpoint")


def test_two_ranks_cannot_tell_who_is_right(run: Any) -> None:
    for told in run(happen, "everything", "repair"):
        assert "nobody can tell who is right" in told.raised
        assert told.lines[0][2] == [0, 1]


def test_off_looks_at_nothing(run: Any) -> None:
    for told in run(happen, "everything", "off"):
        assert (told.lines, told.warned, told.raised, told.stats["drift_findings"]) == ([], [], "", 0)


# Where there is nothing to find


def run_clean(case: str) -> Told:
    optimizers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
        "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
        "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
        "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
        "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    }
    plans = {
        "accumulate": gs.Plan(pace=gs.accumulate(3)),
        "int8": gs.Plan(compress=gs.int8(block=64), bucket_bytes=1024),
        "powersgd": gs.Plan(compress=gs.powersgd(2)),
        "delayed": gs.Plan(pace=gs.delayed(2)),
    }
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, affine=True), nn.Linear(8, 4))
    guard, optimizer = gs.Guard(drift="raise"), optimizers.get(case, optimizers["adamw"])
    return train(None, steps=66, guard=guard, model=_Batched(model), optimizer=optimizer, plan=plans.get(case))


class _Batched(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(torch.stack([x, x * 2, -x])).square().sum()


@pytest.mark.parametrize(
    "case",
    ["sgd", "adamw", "tensor lr", "adagrad", "rmsprop", "nadam", "rprop", "asgd", "accumulate", "int8", "powersgd",
     "delayed"],
)  # fmt: skip
def test_a_clean_run_has_no_finding(case: str, run: Any) -> None:
    for told in run(run_clean, case):
        assert (told.lines, told.warned, told.raised) == ([], [], "")


def test_delayed_averages_keep_replicas_equal_and_are_watched_too(run: Any) -> None:
    def check(told: Told) -> None:
        assert told.whats == ["drift", "repair"]
        assert told.lines[0][2:4] == ([1], "fp32")

    told = run(flip_delayed, ranks=3)
    assert len({each.digest for each in told}) == 1
    for each in told:
        check(each)


def flip_delayed() -> Told:
    plan = gs.Plan(pace=gs.delayed(2))
    return train(Flip("fp32", "", 5, 29), 5, 1, 72, gs.Guard(drift="repair"), plan=plan)
