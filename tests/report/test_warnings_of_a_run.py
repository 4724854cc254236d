"""Each warning comes when its cause is there, not otherwise, and says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsync.report.post_mortem.first_event import first_event
from gradsync.report.summary import summarize
from gradsync.report.warnings import ReportWarning
from gradsync.trace.flight import FlightEntry, Moment
from gradsync.trace.lines import BucketLayout, BucketPlan, PlanChoice
from gradsync.trace.reader import EarlierRun, RunTrace
from made_runs import NOISY, made_run


def warned(run: RunTrace, words: str) -> ReportWarning | None:
    found = [each for each in summarize(run).warnings if words in each.text]
    assert len(found) < 2
    return found[0] if found else None


def test_clean_runs_warn_of_nothing() -> None:
    for seed in range(20):
        assert summarize(made_run(4, 60, seed, noise=replace(NOISY, stalls=0.0))).warnings == [], f"seed {seed}"


def test_stalls_warn_of_long_steps_at_most() -> None:
    for seed in range(20):
        for each in summarize(made_run(4, 60, seed, noise=NOISY)).warnings:
            assert "times as long as usual" in each.text, f"seed {seed}"


@pytest.mark.parametrize(
    ("earlier", "sentence"),
    [
        ([EarlierRun([0, 120], 43380.0)], "An earlier run in this folder is not shown (steps 0 to 120, ended {})."),
        ([EarlierRun([], 43380.0)], "An earlier run in this folder is not shown (no step, begun {})."),
        (
            [EarlierRun([0, 9], 1.0), EarlierRun([7, 7], 43380.0)],
            "2 earlier runs in this folder are not shown (the last: steps 7 to 7, ended {}).",
        ),
    ],
)
def test_runs_that_were_there_before_are_mentioned(earlier: list[EarlierRun], sentence: str) -> None:
    run = made_run(4, 60)
    run.ranks[2].earlier = earlier  # another rank has seen less of them
    found = warned(run, "earlier run")
    assert found is not None
    assert found.text == sentence.format("1970-01-01 12:03 UTC")
    assert "gradsync report BEFORE AFTER" in found.advice


def test_nothing_overlaps() -> None:
    found = warned(made_run(4, 60, overlap=False), "Nothing overlaps")
    assert found is not None
    assert "torch.compile" in found.advice


def test_one_bucket_cannot_overlap() -> None:
    run = made_run(4, 60, overlap=False)
    for trace in run.ranks.values():
        trace.layouts[:] = [BucketLayout(1, trace.layouts[0].buckets[:1])]
    found = warned(run, "Nothing overlaps")
    assert found is not None
    assert "bucket_bytes" in found.advice
    for trace in run.ranks.values():
        trace.choices.append(PlanChoice(1, {}, 0.1))
    found = warned(run, "Nothing overlaps")
    assert found is not None
    assert "gs.auto() found the fastest" in found.advice


def test_many_tiny_buckets() -> None:
    run = made_run(4, 60, overlap=False)
    for trace in run.ranks.values():
        trace.layouts[:] = [BucketLayout(1, [BucketPlan(index, [index], 4096, None) for index in range(64)])]
    found = warned(run, "64 buckets of 4.1 kB")
    assert found is not None
    assert "bucket_bytes" in found.advice


def as_ddp(run: RunTrace) -> RunTrace:
    for trace in run.ranks.values():
        trace.run = replace(trace.run, source="ddp")
    return run


def test_a_stock_run_is_advised_by_the_knobs_that_it_has() -> None:
    one, many = made_run(4, 60, overlap=False), made_run(4, 60, overlap=False)
    for trace in one.ranks.values():
        trace.layouts[:] = [BucketLayout(1, trace.layouts[0].buckets[:1])]
    for trace in many.ranks.values():
        trace.layouts[:] = [BucketLayout(1, [BucketPlan(index, [index], 4096, None) for index in range(64)])]
    advice = [each.advice for run in (one, many) for each in summarize(as_ddp(run)).warnings]
    advice += [each.advice for each in summarize(as_ddp(made_run(4, 60, slow={1: {"input": 0.05}}))).blame]
    assert len(advice) >= 4
    assert sum("bucket_cap_mb" in each for each in advice) == 2
    assert sum("observer.data(loader)" in each for each in advice) == 1
    assert not any(word in each for each in advice for word in ("bucket_bytes", "gs.Plan", "gs.auto", "sync.data"))


def test_a_plan_without_overlap_is_told_what_it_asked_for() -> None:
    run = made_run(4, 60, overlap=False)
    for trace in run.ranks.values():
        trace.run = replace(trace.run, plan={"overlap": "none"})
    found = warned(run, "Nothing overlaps")
    assert found is not None
    assert "asks" in found.text
    assert 'overlap="backward"' in found.advice


def test_buckets_that_leave_early_and_arrive_late_are_not_said_to_begin_late() -> None:
    run = made_run(4, 60, overlap=False)
    for trace in run.ranks.values():
        for step in trace.steps:
            [backward] = [phase for phase in step.phases if phase.name == "backward"]
            step.buckets = [each._replace(launched=backward.start + 1e-3) for each in step.buckets or []]
    found = warned(run, "overlaps")
    assert found is not None
    assert found.text.startswith("Hardly anything overlaps: buckets leave during backward")
    assert "torch.compile" not in found.advice


def test_a_parameter_that_holds_up_full_buckets() -> None:
    run = made_run(2, 60)
    run.ranks[1].steps[:] = [replace(step, held_up_by="a\nb") for step in run.ranks[1].steps]
    assert warned(run, "wait for a�b in 59 of 59 steps") is not None
    run.ranks[1].steps[5:] = [replace(step, held_up_by=None) for step in run.ranks[1].steps[5:]]
    assert warned(run, "wait for") is None


def test_compression_that_costs_more_than_it_saves() -> None:
    assert warned(made_run(4, 60, ratio=4.0, encode_s=0.03), "costs more than it saves") is not None
    assert warned(made_run(4, 60, ratio=4.0, encode_s=0.001), "costs more than it saves") is None


def test_a_large_error_of_compression() -> None:
    assert warned(made_run(4, 60, ratio=4.0, stats={"audit_error": 0.8}), "80 %") is not None
    assert warned(made_run(4, 60, ratio=4.0, stats={"audit_error": 0.01}), "exact mean") is None


def test_staleness_at_its_bound() -> None:
    at_bound = {"staleness_max": 4, "staleness_mean": 3.0, "staleness_bound": 4}
    assert warned(made_run(2, 60, stats=at_bound), "4 are allowed") is not None
    assert warned(made_run(2, 60, stats=at_bound | {"staleness_mean": 0.5}), "allowed") is None


@pytest.mark.parametrize(("predicted", "off"), [(0.045, False), (0.02, True), (0.1, True), (None, False)])
def test_a_prediction_that_is_off(predicted: float | None, off: bool) -> None:
    assert (warned(made_run(4, 60, stats={"predicted_step_s": predicted}), "predicted") is not None) == off


def test_missing_files_torn_lines_and_short_runs() -> None:
    run = made_run(4, 5)
    del run.ranks[1], run.ranks[2]
    run.ranks[0].num_unreadable = 3
    assert warned(run, "files of ranks 1 and 2 are not here") is not None
    assert warned(run, "3 lines could not be read") is not None
    assert warned(run, "too few to call a rank late") is not None


def test_ranks_that_stop_while_others_end() -> None:
    run = made_run(4, 60)
    run.ranks[2].end = None
    found = warned(run, "Rank 2 stopped without a last word")
    assert found is not None
    assert "gradsync doctor" in found.advice


def test_a_run_that_still_goes_on_is_not_called_stopped() -> None:
    run = made_run(4, 60)
    for trace in run.ranks.values():
        trace.end = None
    assert warned(run, "stopped") is None


def test_few_steps_that_take_a_good_part_of_the_time() -> None:
    run = made_run(4, 60)
    for trace in run.ranks.values():
        trace.steps[30] = replace(trace.steps[30], step_s=5.0)
    assert warned(run, "1 of 59 steps take") is not None


def test_a_trace_that_a_full_disk_cut_short_is_no_crash() -> None:
    run = made_run(2, 30)
    for trace in run.ranks.values():
        trace.end = None
        trace.flight = [FlightEntry(1, 9.0, 60, Moment.STEPPED, None), FlightEntry(2, 9.5, 60, Moment.LEFT, None)]
    assert any("cut short after step 30" in warned.text for warned in summarize(run).warnings)
    assert first_event(run, now=1e12) is None
