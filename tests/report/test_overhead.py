"""What synchronization costs adds up, is charged to who caused it, and is not moved by single steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsync.report.overhead import Overhead, measure
from gradsync.report.table import tabulate
from gradsync.trace.lines import StepLine, StepPart
from gradsync.trace.reader import RunTrace
from made_runs import NOISY, Noise, made_run

EXACT = Noise()


def overhead_of(run: RunTrace) -> Overhead:
    found = measure(tabulate(run))
    assert found is not None
    return found


def test_parts_add_up() -> None:
    for seed in range(10):
        found = overhead_of(made_run(4, 60, seed, noise=NOISY, slow={1: {"input": 0.02}}))
        assert found.waiting_s + found.network_s == pytest.approx(found.exposed_s)
        assert found.own_s + found.exposed_s == pytest.approx(found.step_s)
        assert sum(found.charged_s.values()) == pytest.approx(found.waiting_s)


def test_waiting_is_charged_to_the_rank_that_was_waited_for() -> None:
    found = overhead_of(made_run(4, 60, noise=EXACT, slow={2: {"input": 0.04}}))
    # Three of four ranks wait for it.
    assert found.charged_s[2] == pytest.approx(0.75 * 0.04, rel=0.1)
    assert found.charged_s[0] == found.charged_s[1] == found.charged_s[3] == pytest.approx(0.0, abs=1e-9)


def test_two_late_ranks_share_what_they_cost() -> None:
    found = overhead_of(made_run(4, 60, noise=EXACT, times={1: 2.0, 3: 2.0}))
    assert found.charged_s[1] == pytest.approx(found.charged_s[3])
    assert found.charged_s[1] + found.charged_s[3] == pytest.approx(found.waiting_s)


def test_with_everybody_ready_at_once_all_is_the_network() -> None:
    found = overhead_of(made_run(4, 60, noise=EXACT, slow_links={(0, 1): 0.1}))
    assert found.waiting_s == pytest.approx(0.0, abs=1e-9)
    assert found.network_s == pytest.approx(found.exposed_s)


def test_communication_is_measured_without_the_waiting_for_late_ranks() -> None:
    usual, late = (overhead_of(made_run(4, 60, noise=EXACT, slow=slow)) for slow in ({}, {2: {"input": 0.5}}))
    assert late.comm_s == pytest.approx(usual.comm_s)
    assert late.bus_bandwidth == pytest.approx(usual.bus_bandwidth)
    assert late.overlap == pytest.approx(usual.overlap)


def test_some_very_long_steps_change_nothing() -> None:
    run = made_run(4, 61, noise=EXACT)
    before = overhead_of(run)
    for trace in run.ranks.values():
        trace.steps[10:20] = [
            replace(step, step_s=60.0, exposed_s=59.0, phases=[StepPart("wait", 1.0, 60.0)])
            for step in trace.steps[10:20]
        ]
    assert overhead_of(run).step_s == pytest.approx(before.step_s)
    assert overhead_of(run).share == pytest.approx(before.share)


def test_overlap_is_all_where_communication_hides_and_nothing_where_it_does_not() -> None:
    shown = [StepPart("forward", 0.0, 1.0), StepPart("wait", 1.0, 1.5)]
    for hidden_s, expected in ((0.0, 0.0), (0.25, 1 / 3), (9.0, 1.0)):
        run = made_run(2, 20)
        for trace in run.ranks.values():
            trace.steps[:] = [
                StepLine(each.step, each.at, 1.5, shown, exposed_s=0.5, comm_s=0.5 + hidden_s) for each in trace.steps
            ]
        assert overhead_of(run).overlap == pytest.approx(expected)


def test_where_few_steps_synchronize_all_count_alike() -> None:
    run = made_run(2, 41, noise=EXACT)
    for trace in run.ranks.values():
        idle = [StepPart("forward", 0.0, 0.01)]
        trace.steps[:] = [
            step if step.step % 4 == 0 else StepLine(step.step, step.at, 0.01, idle) for step in trace.steps
        ]
    found = overhead_of(run)
    assert found.seldom
    assert 0 < found.share < 0.1


def test_a_run_of_nothing_but_its_first_step_has_no_usual_step() -> None:
    dropped = made_run(2, 3)
    for trace in dropped.ranks.values():
        trace.steps[1:] = [replace(step, counts=False) for step in trace.steps[1:]]
    for run in (made_run(2, 0), dropped):
        assert measure(tabulate(run)) is None


def test_nonsense_in_a_file_is_kept_within_the_step() -> None:
    run = made_run(2, 20)
    run.ranks[0].steps[:] = [replace(step, exposed_s=1e18, comm_s=-1.0) for step in run.ranks[0].steps]
    found = overhead_of(run)
    assert 0 <= found.share <= 1
    assert found.network_s >= 0
