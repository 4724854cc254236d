"""The step that is shown is as long as most, and what is said of it is counted; what comes regularly is told apart."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gradsync.report.lateness import lateness
from gradsync.report.periodic_steps import Regular, find_regular
from gradsync.report.pictures.timeline import draw_timeline
from gradsync.report.summary import summarize
from gradsync.report.table import tabulate
from gradsync.report.typical_step import Usual, usual_step
from gradsync.trace.lines import StepLine, StepPart
from gradsync.trace.reader import RunTrace
from gradsync.trace.tracer import is_detailed
from made_runs import NOISY, made_run

VALIDATION_S = 0.126


def longer(step: StepLine, more_s: float, mine: bool, part: str = "input") -> StepLine:
    """The same step, in which this rank, or another one, does something more before its forward pass."""
    phases, shift = [], 0.0
    for phase in step.phases:
        grows = more_s if phase.name == (part if mine else "wait") else 0.0
        phases.append(StepPart(phase.name, phase.start + shift, phase.stop + shift + grows))
        shift += grows
    waited = step.exposed_s + (0.0 if mine else more_s)
    return replace(step, phases=phases, step_s=step.step_s + more_s, exposed_s=waited)


def validating(run: RunTrace, every: int, ranks: tuple[int, ...] = (0,), part: str = "input") -> RunTrace:
    """After every so many steps these ranks validate."""
    for rank, trace in run.ranks.items():
        trace.steps = [
            longer(step, VALIDATION_S, rank in ranks, part) if step.step % every == 0 else step for step in trace.steps
        ]
    return run


def recorded(run: RunTrace, old: bool = False) -> RunTrace:
    """With buckets only in the steps in which a tracer takes them; `old`: as every tenth was once."""
    for trace in run.ranks.values():
        trace.steps = [
            step
            if step.step < 50 or (step.step % 10 == 0 if old else is_detailed(step.step))
            else replace(step, buckets=None)
            for step in trace.steps
        ]
    return run


def usual_of(run: RunTrace) -> Usual:
    found = usual_step(tabulate(run))
    assert found is not None
    return found


def caption(run: RunTrace) -> str:
    table = tabulate(run)
    return re.sub(r"<[^>]*>", " ", draw_timeline(table, lateness(table)).rpartition("<p>")[2])


@pytest.mark.parametrize("every", [10, 20, 100])
def test_a_usual_step_is_shown_whatever_training_does_every_so_many_steps(every: int) -> None:
    for seed in range(5):
        run = recorded(validating(made_run(2, 600, seed, noise=NOISY), every))
        usual = usual_of(run)
        assert usual.detailed
        assert usual.step_s == pytest.approx(usual.median_s, rel=0.1)
        assert usual.step % every


def test_of_an_old_trace_a_usual_step_is_shown_without_its_buckets() -> None:
    run = recorded(validating(made_run(2, 600), 10), old=True)
    usual = usual_of(run)
    assert not usual.detailed
    assert usual.step_s == pytest.approx(usual.median_s, rel=0.05)
    assert usual.nearest_detailed is not None
    assert usual.nearest_detailed[1] > 2 * usual.median_s
    said = caption(run)
    assert f"None of the {usual.num_detailed} recorded bucket by bucket was as long as most" in said
    assert "Buckets were not recorded" in said


def test_an_old_trace_of_nothing_special_still_shows_its_buckets() -> None:
    usual = usual_of(recorded(made_run(2, 600), old=True))
    assert (usual.detailed, usual.num_steps, usual.num_detailed) == (True, 200, 20)


def test_the_caption_is_counted() -> None:
    run = made_run(2, 101)
    for trace in run.ranks.values():
        trace.steps = [
            replace(step, step_s=step.step / 1000, buckets=step.buckets if step.step in (30, 61) else None)
            for step in trace.steps
        ]
    # Steps 2 to 101, of 2 to 101 ms: the median is 51.5 ms, and 59 are shorter than that of 61 ms.
    assert (
        "Step 61 took 61 ms; the median of the last 100 steps is 51.5 ms, and 60 % of them were shorter. "
        "Of those recorded bucket by bucket (2 of them were) it is the nearest to the median."
    ) in caption(run)
    assert "it is the latest near the median." in caption(made_run(2, 101))


def test_of_equally_usual_steps_the_latest_is_shown() -> None:
    """A run whose rank 1 became slow, while its steps stayed as long: how it goes now is in the picture."""
    run = made_run(2, 160, noise=NOISY)
    usual = usual_of(recorded(run))
    assert usual.detailed
    assert usual.step > 80
    assert 0.4 <= usual.shorter <= 0.6


def found_in(run: RunTrace) -> list[Regular]:
    return find_regular(tabulate(run))


@pytest.mark.parametrize("noise", [None, NOISY])
def test_validation_on_one_rank_is_told_as_such_and_not_as_input(noise: object) -> None:
    quiet = made_run(3, 200, noise=NOISY) if noise else made_run(3, 200)
    run = validating(quiet, 10)
    [found] = found_in(run)
    assert (found.ranks, found.everybody, found.every, found.part) == ([0], False, 10, "input")
    assert found.more_s == pytest.approx(VALIDATION_S, rel=0.15)
    summary = summarize(run)
    assert summary.blame == []
    [warned] = [each for each in summary.warnings if each.text.startswith("Every 10 steps")]
    assert re.match(
        r"Every 10 steps rank 0 takes 1[0-9.]+ ms longer, between the optimizer and the next forward, and the others "
        r"wait for it: [0-9.]+ % of all time\.",
        warned.text,
    )
    assert "validation" in warned.advice
    assert not any("more than 3 times as long" in each.text for each in summary.warnings)


def test_what_all_ranks_do_is_said_of_all() -> None:
    [found] = found_in(validating(made_run(2, 100), 25, (0, 1), "forward"))
    assert (found.everybody, found.every, found.part) == (True, 25, "forward")
    [warned] = [each for each in summarize(validating(made_run(2, 100), 25, (0, 1))).warnings if "Every" in each.text]
    assert warned.text.startswith("Every 25 steps all ranks take 1")
    assert "wait" not in warned.text


def test_stalls_are_not_regular_and_a_straggler_is_none_either() -> None:
    for seed in range(20):
        assert found_in(made_run(4, 100, seed, noise=NOISY, detailed=False)) == [], f"seed {seed}"
        assert found_in(made_run(2, 60, seed, slow={1: {"input": 0.1}}, detailed=False)) == [], f"seed {seed}"


def test_input_that_was_timed_is_called_input() -> None:
    run = validating(made_run(2, 100), 20)
    for trace in run.ranks.values():
        trace.steps = [replace(step, exact_input=True) for step in trace.steps]
    [warned] = [each for each in summarize(run).warnings if each.text.startswith("Every 20 steps")]
    assert "in input, and the others wait" in warned.text
    assert "persistent_workers" in warned.advice
