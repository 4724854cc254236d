"""Two runs: which is better, by how much, and where from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsync.report.compare import Comparison, compare
from gradsync.report.summary import summarize
from gradsync.trace.reader import RunTrace
from made_runs import made_run


def compared(first: RunTrace, second: RunTrace) -> Comparison:
    return compare(summarize(first), summarize(second), ("old", "new"))


def test_the_shorter_step_is_better_whichever_comes_first() -> None:
    slow, fast = made_run(4, 60, slow={1: {"input": 0.05}}), made_run(4, 60)
    assert compared(slow, fast).verdict.startswith("new is better: its step is 5")
    assert compared(fast, slow).verdict.startswith("old is better: its step is 5")


def test_the_cause_is_named() -> None:
    usual = made_run(4, 60)
    late, link, slow = (
        made_run(4, 60, slow={1: {"input": 0.05}}),
        made_run(4, 60, slow_links={(0, 1): 0.1}),
        made_run(4, 60, times=dict.fromkeys(range(4), 2.0)),
    )
    assert "less waiting for late ranks" in compared(late, usual).verdict
    assert "less waiting for the exchange" in compared(link, usual).verdict
    assert "less computing" in compared(slow, usual).verdict


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_wait_has_one_name_in_a_report_of_one_run_and_of_two(hosts: int) -> None:
    run = made_run(4, 60, hosts=hosts)
    alone = {fact.name for fact in summarize(run).facts}
    both = {row.name for row in compared(run, run).rows}
    for name in ("exposed", "  for ranks", "  for the exchange", "compute"):
        assert name in alone
        assert name in both


def test_what_went_the_other_way_is_not_kept_quiet() -> None:
    first = made_run(4, 60, slow_links={(0, 1): 0.1})
    second = made_run(4, 60, times=dict.fromkeys(range(4), 2.0))
    verdict = compared(first, second).verdict
    assert "less waiting for the exchange" in verdict
    assert "but" in verdict
    assert "more computing" in verdict


def test_equal_runs_are_equal() -> None:
    comparison = compared(made_run(4, 60, seed=1), made_run(4, 60, seed=2))
    assert comparison.verdict.startswith("Steps are equally long")


def test_a_run_without_steps_cannot_be_compared() -> None:
    assert compared(made_run(4, 60), made_run(4, 0)).verdict == (
        "They cannot be compared: new has no step that counts."
    )
    assert "old has no step" in compared(made_run(4, 0), made_run(4, 0)).verdict


def test_other_numbers_of_ranks_are_said() -> None:
    assert "on 2 and 4 ranks" in compared(made_run(2, 60), made_run(4, 60, slow={0: {"input": 0.05}})).verdict


def test_rows_show_both_and_the_difference() -> None:
    rows = {row.name: row for row in compared(made_run(4, 60, ratio=4.0), made_run(4, 60)).rows}
    assert rows["compression ratio"].difference == "−75 %"
    assert rows["sent"].difference == "+300 %"
    assert rows["ranks"].difference == ""
    assert rows["stragglers"].first == "none"


def test_steps_of_several_batches_are_compared_by_the_batch() -> None:
    """A run that accumulates has longer steps, and may be the faster one."""
    plain, accumulating = made_run(4, 60), made_run(4, 60, times=dict.fromkeys(range(4), 3.0))
    for trace in accumulating.ranks.values():
        trace.run = replace(trace.run, plan={"pace": {"kind": "accumulate", "k": 4}})
    verdict = compared(plain, accumulating).verdict
    assert verdict.startswith("new is better: its time per batch is ")


def test_models_of_other_sizes_are_mentioned() -> None:
    first, second = made_run(4, 60), made_run(4, 60, times=dict.fromkeys(range(4), 3.0))
    for trace in second.ranks.values():
        trace.run = replace(trace.run, parameters=[("w", (2000, 1000), "float32")])
    assert "with models of 1 million and 2 million parameters" in compared(first, second).verdict
