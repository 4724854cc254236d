"""Every injected straggler is named, and nobody in clean runs: over many seeds, and machines of many moods."""

from __future__ import annotations

import random

import pytest

from gradsync.report.lateness import COMPUTATION
from gradsync.report.overhead import measure
from gradsync.report.slow_ranks import Blame, find_blame
from gradsync.report.table import tabulate
from gradsync.trace.reader import RunTrace
from made_runs import CROWDED, NOISY, QUIET, Noise, made_run

MACHINES = pytest.mark.parametrize("noise", [QUIET, NOISY, CROWDED], ids=["quiet", "noisy", "crowded"])


def blame_of(run: RunTrace) -> list[Blame]:
    table = tabulate(run)
    overhead = measure(table)
    return [] if overhead is None else find_blame(run, table, overhead)


@MACHINES
@pytest.mark.parametrize("ranks", [2, 4])
def test_nobody_is_blamed_in_clean_runs(noise: Noise, ranks: int) -> None:
    for seed in range(40):
        assert blame_of(made_run(ranks, 60, seed, noise=noise, detailed=False)) == [], f"seed {seed}"


@MACHINES
@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer", "encode"])
def test_a_slow_phase_is_blamed_on_its_rank(noise: Noise, phase: str) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        ranks = rng.choice([2, 3, 4])
        rank = rng.randrange(ranks)
        found = blame_of(made_run(ranks, 60, seed, noise=noise, slow={rank: {phase: rng.uniform(0.035, 0.08)}}))
        assert [(each.rank, each.phase) for each in found] == [(rank, phase)], f"seed {seed}"


@MACHINES
def test_a_slow_processor_is_blamed_as_such(noise: Noise) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        ranks = rng.choice([2, 3, 4])
        rank = rng.randrange(ranks)
        found = blame_of(made_run(ranks, 60, seed, noise=noise, times={rank: rng.uniform(1.9, 4.0)}))
        assert [(each.rank, each.phase) for each in found] == [(rank, COMPUTATION)], f"seed {seed}"


@MACHINES
def test_two_late_ranks_are_both_named_the_worse_first(noise: Noise) -> None:
    for seed in range(8):
        found = blame_of(made_run(4, 60, seed, noise=noise, slow={1: {"input": 0.06}, 3: {"optimizer": 0.12}}))
        assert [(each.rank, each.phase) for each in found] == [(3, "optimizer"), (1, "input")], f"seed {seed}"


@MACHINES
def test_two_slow_processors_are_both_named(noise: Noise) -> None:
    for seed in range(8):
        found = blame_of(made_run(4, 60, seed, noise=noise, times={0: 2.2, 2: 2.2}, detailed=False))
        assert {(each.rank, each.phase) for each in found} == {(0, COMPUTATION), (2, COMPUTATION)}, f"seed {seed}"


def test_a_slow_link_is_no_rank_s_fault() -> None:
    for seed in range(20):
        assert blame_of(made_run(4, 60, seed, noise=NOISY, slow_links={(0, 1): 0.05})) == []


def test_a_small_but_steady_difference_shows_among_steady_ranks() -> None:
    found = blame_of(made_run(8, 60, noise=Noise(jitter=0.01), times={5: 1.2}))
    assert [(each.rank, each.phase) for each in found] == [(5, COMPUTATION)]


def test_a_difference_that_does_not_matter_is_left_alone() -> None:
    assert blame_of(made_run(4, 60, noise=QUIET, slow={1: {"input": 0.001}})) == []


def test_one_stall_in_ten_steps_is_no_habit() -> None:
    run = made_run(4, 100, noise=QUIET)
    stalled = made_run(4, 100, noise=QUIET, slow={2: {"input": 0.5}})
    for rank, trace in run.ranks.items():
        trace.steps[::10] = stalled.ranks[rank].steps[::10]
    assert blame_of(run) == []


def test_who_was_late_long_ago_is_forgiven_and_who_is_late_now_is_not() -> None:
    good, bad = made_run(4, 600), made_run(4, 600, slow={2: {"input": 0.05}})
    for rank in range(4):
        good.ranks[rank].steps[:300], bad.ranks[rank].steps[:300] = (
            bad.ranks[rank].steps[:300],
            good.ranks[rank].steps[:300],
        )
    assert blame_of(good) == []
    assert [each.rank for each in blame_of(bad)] == [2]


def test_a_processor_that_was_taken_away_for_a_second_is_no_habit() -> None:
    run, busy = made_run(4, 300), made_run(4, 300, times={1: 2.0})
    for rank in range(4):
        run.ranks[rank].steps[-20:] = busy.ranks[rank].steps[-20:]
    assert blame_of(run) == []


def test_the_sentence_names_rank_host_steps_time_and_phase() -> None:
    (found,) = blame_of(made_run(4, 60, slow={3: {"input": 0.038}}))
    assert found.text.startswith("rank 3 (host b) is late in 50 of the last 50 steps, by 3")
    assert found.text.endswith(" ms, in its input, or what else comes between its optimizer and its forward pass")
    assert 0 < found.score < 0.75
    assert "loader" in found.advice


def test_a_few_steps_are_too_few_to_blame_anybody() -> None:
    assert blame_of(made_run(4, 10, slow={3: {"input": 0.05}})) == []
    assert len(blame_of(made_run(4, 11, slow={3: {"input": 0.05}}))) == 1


def test_ranks_without_files_cannot_be_blamed_and_others_still_are() -> None:
    run = made_run(4, 60, slow={3: {"input": 0.05}})
    del run.ranks[0]
    assert [each.rank for each in blame_of(run)] == [3]
    del run.ranks[3]
    assert blame_of(run) == []


def test_names_of_hosts_cannot_move_the_cursor() -> None:
    (found,) = blame_of(made_run(2, 60, slow={1: {"input": 0.05}}, names=("a", "\x1b[2Jb\n")))
    assert found.text.isprintable()
