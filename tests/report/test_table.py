"""Steps by number and rank: what counts, what is the latest run in a folder."""

from __future__ import annotations

from dataclasses import replace

from gradsync.report.table import tabulate
from made_runs import made_run


def test_every_step_of_every_rank_has_its_cell() -> None:
    run = made_run(3, steps=7)
    table = tabulate(run)
    assert table.ranks == [0, 1, 2]
    assert table.steps == list(range(1, 8))
    assert all(table.cell(step, rank) is run.ranks[rank].steps[step - 1] for step in table.steps for rank in range(3))
    assert table.cell(8, 0) is None
    assert table.cell(1, 3) is None


def test_the_first_step_and_dropped_ones_are_not_judged() -> None:
    run = made_run(2, steps=6)
    run.ranks[1].steps[3] = replace(run.ranks[1].steps[3], counts=False)
    assert tabulate(run).judged() == [2, 3, 5, 6]


def test_the_last_few_steps_are_those_at_the_end_and_all_of_them_are_judged() -> None:
    table = tabulate(made_run(2, steps=30), last=4)
    assert table.steps == table.judged() == [27, 28, 29, 30]


def test_a_run_that_began_again_in_the_same_folder_is_the_later_one() -> None:
    run, later = made_run(2, steps=30), made_run(2, steps=4, seed=1)
    for rank in (0, 1):
        run.ranks[rank].steps.extend(later.ranks[rank].steps)
    table = tabulate(run)
    assert table.steps == [1, 2, 3, 4]
    assert table.cell(2, 1) is later.ranks[1].steps[1]


def test_steps_of_no_length_are_left_out() -> None:
    run = made_run(2, steps=3)
    run.ranks[0].steps[1] = replace(run.ranks[0].steps[1], step_s=0.0)
    assert tabulate(run).cell(2, 0) is None
