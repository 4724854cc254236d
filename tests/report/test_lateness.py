"""Lateness is on each rank's own clock, and names what took longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsync.report.lateness import COMPUTATION, PARTS, lateness, low_median, own_parts
from gradsync.report.table import tabulate
from gradsync.trace.lines import StepLine, StepPart
from made_runs import QUIET, made_run


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer", "encode"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_slow_phase_is_found_in_every_step_by_as_much_as_it_is_slow(phase: str, ranks: int) -> None:
    late = lateness(tabulate(made_run(ranks, 20, slow={1: {phase: 0.03}})))
    for step in range(2, 21):
        assert late[step, 1].phase == phase
        assert late[step, 1].late_s == pytest.approx(0.03, rel=0.5)
        assert late[step, 0].late_s < 0.005


def test_a_slow_processor_slows_all_of_the_computation() -> None:
    late = lateness(tabulate(made_run(4, 20, times={2: 2.0})))
    assert {late[step, 2].phase for step in range(2, 21)} == {COMPUTATION}


def test_who_is_early_is_blamed_for_nothing() -> None:
    late = lateness(tabulate(made_run(4, 10, slow={0: {"input": 0.05}})))
    assert all((each.phase is None) == (each.late_s <= 0) for each in late.values())


def test_clocks_of_hosts_do_not_matter() -> None:
    run = made_run(3, 10, seed=3)
    before = lateness(tabulate(run))
    run.ranks[1].steps[:] = [replace(step, at=step.at + 1e6) for step in run.ranks[1].steps]
    assert lateness(tabulate(run)) == before


def test_two_late_ranks_of_three_are_both_late() -> None:
    late = lateness(tabulate(made_run(3, 10, slow={0: {"input": 0.05}, 2: {"input": 0.05}}, noise=QUIET)))
    assert all(late[step, rank].late_s > 0.03 for step in range(2, 11) for rank in (0, 2))
    assert all(late[step, 1].late_s < 0.0 for step in range(2, 11))


def test_a_step_of_one_rank_only_has_no_lateness() -> None:
    run = made_run(2, 5)
    del run.ranks[1].steps[2:]
    assert {step for step, _ in lateness(tabulate(run))} == {1, 2}


def test_parts_add_up_to_the_own_work() -> None:
    for trace in made_run(2, 10, encode_s=0.004).ranks.values():
        for step in trace.steps:
            assert sum(own_parts(step).values()) == pytest.approx(step.own_s)
            assert set(own_parts(step)) == set(PARTS)


def test_nonsense_in_a_file_makes_no_negative_parts() -> None:
    phases = [StepPart("input", 5.0, 1.0), StepPart("backward", 0.0, 1e9), StepPart("nap", 0.0, 1.0)]
    for step in (StepLine(1, 0.0, 2.0, phases, encode_s=-3.0), StepLine(1, 0.0, 2.0, [], exposed_s=1e18)):
        assert all(seconds >= 0 for seconds in own_parts(step).values())


def test_the_lower_median_of_two_others_is_the_one_on_time() -> None:
    assert low_median([3.0, 1.0]) == 1.0
    assert low_median([4.0]) == 4.0
