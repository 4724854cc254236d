"""Pictures: they show what is in the run, stay small however large it was, and no name can break them."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from gradsync.report.lateness import lateness
from gradsync.report.pictures import binning, heat_map, overhead_chart, parameter_table, staleness_chart, timeline
from gradsync.report.table import tabulate
from gradsync.report.typical_step import typical_step
from gradsync.trace.lines import BucketTimes, Stats, StepPart
from gradsync.trace.reader import RunTrace
from made_runs import made_run


def svg_of(html: str) -> ElementTree.Element:
    """The (first) picture of a figure, as XML that must be well formed."""
    found = re.search(r"<svg.*?</svg>", html, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def titles(html: str) -> list[str]:
    return [title.text or "" for title in svg_of(html).iter("title")]


def drawn(run: RunTrace) -> str:
    table = tabulate(run)
    return timeline.draw_timeline(table, lateness(table))


def test_every_picture_has_a_role_and_says_what_it_is() -> None:
    run = made_run(steps=20, stats={"staleness_histogram_0": 3, "staleness_histogram_1": 4})
    table = tabulate(run)
    for html in (
        drawn(run),
        overhead_chart.draw_overhead(table),
        heat_map.draw_heat(table, lateness(table)),
        staleness_chart.draw_staleness(run),
    ):
        svg = svg_of(html)
        assert svg.get("role") == "img"
        assert len(svg.get("aria-label", "")) > 10


def test_timeline_shows_every_phase_and_every_bucket_of_every_rank() -> None:
    said = titles(drawn(made_run(ranks=3, steps=30)))
    for rank in range(3):
        for phase in ("optimizer", "input", "forward", "backward", "wait"):
            assert any(text.startswith(f"rank {rank}, {phase}:") for text in said)
        for bucket in range(4):
            assert any(text.startswith(f"rank {rank}, bucket {bucket}:") for text in said)


def test_exposed_part_of_a_bucket_is_where_it_travels_while_its_rank_waits() -> None:
    run = made_run(ranks=2, steps=3)
    for trace in run.ranks.values():
        step = trace.steps[-1]
        phases = [StepPart("backward", 0.0, 0.010), StepPart("wait", 0.010, 0.020)]
        buckets = [
            BucketTimes(0, 0.002, 0.002, 0.002, 0.008, None, None, 10, 0.0, 0.0),
            BucketTimes(1, 0.009, 0.009, 0.009, 0.020, 0.01, 0.02, 10, 0.0, 0.0),
        ]
        trace.steps = [replace(step, phases=phases, buckets=buckets, step_s=0.020)]
    svg = svg_of(drawn(run))
    bars = [rect for rect in svg.iter("rect") if rect.get("class") == "exposed"]
    assert len(bars) == 2
    whole = 920 - 96 - 14
    for bar in bars:
        assert float(bar.get("x", "0")) == pytest.approx(96 + whole / 2, abs=1)
        assert float(bar.get("width", "0")) == pytest.approx(whole / 2, abs=1)


def test_timeline_of_a_run_that_recorded_no_buckets_shows_its_phases() -> None:
    html = drawn(made_run(source="ddp", steps=10))
    assert "backward" in html
    assert "Buckets were not recorded" in html


def test_timeline_shows_a_late_step_of_a_run_that_changed() -> None:
    run = made_run(ranks=2, steps=300)
    for trace in run.ranks.values():
        trace.steps = [replace(step, step_s=3 * step.step_s) if step.step <= 60 else step for step in trace.steps]
    usual = typical_step(tabulate(run))
    assert usual is not None
    assert usual.step > 60


def test_overhead_splits_waiting_into_late_ranks_and_network() -> None:
    slow_rank = overhead_chart.costs(tabulate(made_run(steps=40, slow={1: {"input": 0.05}})))
    slow_link = overhead_chart.costs(tabulate(made_run(steps=40, slow_links={(0, 1): 0.05})))
    assert all(cost.late > 5 * cost.network for cost in slow_rank)
    assert all(cost.network > 5 * cost.late for cost in slow_link)
    for cost in (*slow_rank, *slow_link):
        assert 0 <= cost.both <= 1


def test_heat_map_marks_the_late_rank_and_no_other() -> None:
    table = tabulate(made_run(steps=60, slow={2: {"input": 0.05}}))
    said = titles(heat_map.draw_heat(table, lateness(table)))
    assert len(said) > 40
    assert all(text.startswith("rank 2,") for text in said)


def test_heat_map_of_a_clean_run_is_empty() -> None:
    table = tabulate(made_run(steps=60))
    assert titles(heat_map.draw_heat(table, lateness(table))) == []


def test_a_parameters_ratio_is_that_of_its_bucket() -> None:
    run = made_run(steps=5, ratio=4.0)
    for weight in parameter_table.weights(run):
        assert weight.sent == pytest.approx(weight.nbytes / 4)
        assert weight.compressor == "int8"
    assert "4×" in parameter_table.draw_parameters(run)


def test_a_ratio_of_another_layout_is_none_of_this_one() -> None:
    run = made_run(steps=60, ratio=4.0)
    for trace in run.ranks.values():
        trace.layouts.append(replace(trace.layouts[-1], step=55))
        trace.steps = [replace(step, buckets=None) if step.step >= 55 else step for step in trace.steps]
    assert all(weight.sent is None for weight in parameter_table.weights(run))


def test_parameters_beyond_the_top_are_summed() -> None:
    run = made_run(steps=2)
    many = [(f"p{index}", (index + 1,), "float32") for index in range(1000)]
    for trace in run.ranks.values():
        trace.run = replace(trace.run, parameters=many)
        trace.layouts.clear()
    html = parameter_table.draw_parameters(run)
    assert "960 smaller ones together" in html
    assert html.count("<tr>") == 1 + 40 + 1
    assert sum(weight.nbytes for weight in parameter_table.weights(run)) == 4 * sum(range(1, 1001))


def test_staleness_adds_up_over_ranks_and_takes_only_the_last_word() -> None:
    run = made_run(ranks=2, steps=4)
    for trace in run.ranks.values():
        trace.stats = [
            Stats(2, {"staleness_histogram_0": 1}),
            Stats(4, {"staleness_histogram_0": 5, "staleness_histogram_2_3": 2, "staleness_mean": 0.7}),
        ]
    assert staleness_chart.counts(run) == {(0, 0): 10, (2, 3): 4}
    assert "staleness 2–3: 4 updates" in staleness_chart.draw_staleness(run)


def test_nothing_is_drawn_where_nothing_is_stale() -> None:
    assert staleness_chart.draw_staleness(made_run(steps=4, stats={"staleness_histogram_0": 7})) == ""
    assert staleness_chart.draw_staleness(made_run(steps=4)) == ""


@pytest.mark.parametrize("most", [1, 3, 7, 100])
@pytest.mark.parametrize("many", [0, 1, 3, 8, 100, 101])
def test_bins_hold_everything_once_and_in_order(many: int, most: int) -> None:
    found = binning.bins(list(range(many)), most)
    assert len(found) <= most
    assert [each for group in found for each in group] == list(range(many))


@pytest.mark.parametrize("value", [1e-9, 3e-4, 0.02, 0.99, 1, 7.3, 10, 99.9, 4e5])
def test_axes_end_at_or_above_their_values_and_not_far_above(value: float) -> None:
    assert value * (1 - 1e-6) <= binning.round_up(value) <= 2.01 * value
