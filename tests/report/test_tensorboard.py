"""TensorBoard's own reader finds every step of every rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from gradsync.errors import GradSyncError
from gradsync.report.exporters.tensorboard import write_board
from made_runs import made_run

Scalars = dict[str, dict[int, float]]


def read(folder: Path) -> Scalars:
    found: Scalars = {}
    for path in folder.iterdir():
        for event in EventFileLoader(str(path)).Load():
            for each in event.summary.value:
                assert event.wall_time > 1.7e9
                found.setdefault(each.tag, {})[event.step] = each.tensor.float_val[0]
    return found


def test_every_step_of_every_rank_is_read_back(tmp_path: Path) -> None:
    run = made_run(ranks=2, steps=6, ratio=4.0, slow={1: {"input": 0.03}})
    count = write_board(run, tmp_path)
    boards = {rank: read(tmp_path / f"rank-{rank}") for rank in run.ranks}
    assert count == sum(len(chart) for board in boards.values() for chart in board.values())
    for rank, trace in run.ranks.items():
        for step in trace.steps:
            assert boards[rank]["step/ms"][step.step] == pytest.approx(1e3 * step.step_s)
            assert boards[rank]["sync/exposed_ms"][step.step] == pytest.approx(1e3 * step.exposed_s)
            assert boards[rank]["sync/overhead"][step.step] == pytest.approx(step.exposed_s / step.step_s)
            assert boards[rank]["bytes/ratio"][step.step] == 4
    assert all(late > 15 for late in boards[1]["sync/late_ms"].values())


def test_one_rank_alone_is_late_for_nobody(tmp_path: Path) -> None:
    write_board(made_run(ranks=1, steps=3), tmp_path)
    board = read(tmp_path / "rank-0")
    assert "sync/late_ms" not in board
    assert len(board["step/ms"]) == 3


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(GradSyncError, match=r"pip install 'gradsync\[report\]'"):
        write_board(made_run(ranks=1, steps=1), tmp_path)
