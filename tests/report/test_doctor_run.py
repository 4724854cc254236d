"""`gradsync doctor RUN`: what happened first, who is slow, and nothing of a clean run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync.cli.main import main
from gradsync.trace.lines import Error, Health
from made_runs import made_run, write_run


@pytest.mark.parametrize("asked", [[], ["--json"]])
def test_after_a_crash_it_says_what_happened_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    lost = Error(10, "PeerLost", [1], 0, "rank 1 (pid 4001) died in step 10")
    write_run(tmp_path, made_run(3, 20, killed={1: 10}, errors={0: lost, 2: lost}))
    assert main(["doctor", str(tmp_path), *asked]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Rank 1 (host a, pid 4001) ended without a word in step 10" in said
    assert "(layers.7.weight, layers.6.weight)" in said
    assert "dmesg" in said


def test_a_clean_run_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, made_run(4, 60))
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("All 4 ranks that wrote here ended in good order, after step 60.")


def test_slow_ranks_and_links_are_named_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "input", made_run(4, 60, slow={1: {"input": 0.03}}))
    write_run(tmp_path / "link", made_run(4, 60, slow_links={(0, 1): 0.1}))
    assert main(["doctor", str(tmp_path / "input")]) == 1
    assert "Slow: rank 1 (host a) is late in" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "link")]) == 1
    assert "Slow: the link from rank 0 (host a) to rank 1 (host a)" in capsys.readouterr().out


def test_names_from_files_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Health(3, "nonfinite", [0], "\x1b[2J[red]w[/red]", 1, "\x1b]0;title\x07 \x9b31m")
    write_run(tmp_path, made_run(2, 20, health=(found,), names=("\x1b[31mhost", "b")))
    assert main(["doctor", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert not any(letter in said for letter in "\x1b\x07\x9b")
    assert "[red]w[/red]" in said
