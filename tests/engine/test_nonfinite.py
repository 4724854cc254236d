"""A NaN or Inf is named with rank, parameter and count; after too many skips every rank stops with the same report."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compress_cases import EVERY, Given, attached, brings
from torch import nn

import gradsync as gs


def spoil(names: list[str], spoiled: dict[int, tuple[str, int]]) -> list[tuple[str, Any]]:
    """For each compressor: what is said of a step in which some ranks have so many NaN in a parameter."""
    said = []
    for name in names:
        model = Given(brings(0))
        with attached(model, EVERY[name], guard=gs.Guard(nonfinite="skip")) as sync:
            lines: list[Any] = []
            sync._synchronization.health_log.listen(lines.append)
            for step in range(4):
                grads = brings(step)
                if step == 3 and dist.get_rank() in spoiled:
                    parameter, count = spoiled[dist.get_rank()]
                    grads[parameter].view(-1)[:count] = torch.tensor([torch.nan, torch.inf]).repeat(count)[:count]
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    model(grads).backward()
            assert all(bool(kept.isfinite().all()) for kept in sync.residuals().values()), name
            said.append((str(caught[-1].message), lines[-1]))
            assert sync.stats()["skipped_steps"] == 1
    return said


@pytest.mark.parametrize(
    ("spoiled", "sentence"),
    [
        ({0: ("number", 1)}, "rank 0 has NaN or Inf in the gradient of weights.number (1 element)"),
        ({1: ("second", 7)}, "rank 1 has NaN or Inf in the gradient of weights.second (7 elements)"),
        (
            {0: ("bias", 2), 2: ("odd", 3)},
            "rank 0 has NaN or Inf in the gradient of weights.bias (2 elements), rank 2 has NaN or Inf in the gradient "
            "of weights.odd (3 elements)",
        ),
    ],
)
def test_rank_parameter_and_count_are_named_before_any_compressor(spoiled: Any, sentence: str, run: Any) -> None:
    names = ["bf16", "int8", "sign", "topk", "powersgd"]
    for said in run(spoil, names, spoiled, ranks=3):
        for name, (message, line) in zip(names, said, strict=True):
            assert f"{sentence}: the step is skipped on every rank" in message, name
            first = min(spoiled)
            assert (line.what, line.ranks) == ("nonfinite", sorted(spoiled)), name
            assert (line.parameter, line.count) == (f"weights.{spoiled[first][0]}", spoiled[first][1]), name


def skip_often(bad: list[int], max_skips: int, pace: Any) -> tuple[list[int], str, list[str], Any]:
    """Steps in which rank 1 has a NaN; which of them were skipped, and the report."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=pace), guard=gs.Guard(nonfinite="skip", max_skips=max_skips))
    lines: list[Any] = []
    sync._synchronization.health_log.listen(lines.append)
    skipped, report = [], ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            x = torch.randn(4, 3)
            if step in bad and dist.get_rank() == 1:
                x[0] = torch.nan
            try:
                model(x).sum().backward()
            except gs.NonFinite as error:
                report = str(error)
                break
            if sync.dropped:
                skipped.append(step)
            optimizer.step()
            optimizer.zero_grad()
    assert all(bool(param.isfinite().all()) for param in model.parameters())
    stats, whats = sync.stats(), [line.what for line in lines]
    sync.detach()
    return skipped, report, whats, stats["skipped_steps"]


@pytest.mark.parametrize("pace", [gs.every_step(), gs.delayed(1)], ids=["every_step", "delayed"])
def test_after_so_many_skips_in_a_row_every_rank_raises_the_same_report(pace: Any, run: Any) -> None:
    late = int(pace != gs.every_step())
    results = run(skip_often, [1, 3, 4, 5, 6, 7], 3, pace)
    for skipped, report, whats, count in results:
        assert skipped == [1 + late, 3 + late, 4 + late], "one that counts in between begins anew"
        assert "3 steps in a row were skipped because of NaN or Inf" in report
        assert "rank 1 has NaN or Inf in the gradient of " in report
        assert "gs.Guard(max_skips=...)" in report
        assert whats == ["nonfinite"] * 4 + ["skips"]
        assert count == 4
    assert len({report.partition("] ")[2] for _, report, _, _ in results}) == 1


def test_fewer_skips_do_not_stop_it(run: Any) -> None:
    for skipped, report, _, count in run(skip_often, [1, 2, 4, 5], 3, gs.every_step()):
        assert (skipped, report, count) == ([1, 2, 4, 5], "", 4)


def test_a_step_is_dropped_for_its_own_gradients_even_after_the_first_one_was(run: Any) -> None:
    for skipped, _, whats, count in run(skip_often, [0], 3, gs.every_step()):
        assert (skipped, whats, count) == ([0], ["nonfinite"], 1)


def go_on_after_a_skip() -> list[float]:
    """Gradients of a large parameter, one of whose steps has a NaN on rank 1: the distance from the mean, by step."""
    weight = nn.Parameter(torch.zeros(1 << 15))  # copied into its bucket by its own hook
    model = nn.Module()
    model.weight = weight
    sync = gs.attach(model, guard=gs.Guard(nonfinite="skip"))
    distances = []
    for step in range(4):
        given = [torch.full_like(weight, 1.0 + step + rank) for rank in range(dist.get_world_size())]
        if step == 2:
            given[1][0] = torch.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (weight * given[dist.get_rank()]).sum().backward()
        if not sync.dropped:
            distances.append(float((weight.grad - sum(given) / len(given)).abs().max()))
        weight.grad = None
    sync.detach()
    return distances


def test_nothing_of_a_skipped_step_is_in_the_next_average(run: Any) -> None:
    assert run(go_on_after_a_skip) == [[0.0, 0.0, 0.0]] * 2


# The loss scale


def scale_differently(policy: Any, off: int) -> tuple[list[str], str, list[Any], float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    sync = gs.attach(model, optimizer, guard=gs.Guard(drift=policy), scaler=scaler)
    lines: list[Any] = []
    sync._synchronization.health_log.listen(lines.append)
    raised = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in range(4):
                if step == 2 and dist.get_rank() == off:
                    scaler.update(32768.0)
                scaler.scale(model(torch.randn(4, 3)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        except gs.GradSyncError as error:
            raised = str(error)
    sync.detach()
    told = [(line.step, line.what, line.ranks, line.text) for line in lines if line.what in ("loss_scale", "repair")]
    return [str(each.message) for each in caught], raised, told, scaler.get_scale()


SENTENCE = "the loss scale is 65536 on ranks 0 and 2 but 32768 on rank 1"


def test_a_loss_scale_that_differs_is_named_in_that_step(run: Any) -> None:
    for warned, _, told, _ in run(scale_differently, "warn", 1, ranks=3):
        assert any(SENTENCE in each for each in warned)
        assert told[0] == (2, "loss_scale", [1], SENTENCE)


def test_a_loss_scale_that_differs_is_repaired_by_the_majority(run: Any) -> None:
    for _, _, told, scale in run(scale_differently, "repair", 1, ranks=3):
        assert [what for _, what, _, _ in told][:2] == ["loss_scale", "repair"]
        assert scale == 65536.0


def test_a_loss_scale_that_differs_raises_before_anything_is_applied(run: Any) -> None:
    results = run(scale_differently, "raise", 1, ranks=3)
    assert {raised for _, raised, _, _ in results} == {SENTENCE + "; give every rank a GradScaler with the same state"}
