"""`gradsync report`: the verdict is the first line, the same as JSON, exports on demand, a sentence for bad input."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from gradsync.cli.main import main
from gradsync.report.summary import summarize
from gradsync.trace.json_lines import to_json
from gradsync.trace.lines import Error, Health
from gradsync.trace.reader import read_run
from made_runs import NOISY, made_run, write_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def late(tmp_path: Path) -> Path:
    return write_run(tmp_path / "late", made_run(4, 60, noise=NOISY, slow={3: {"input": 0.06}}))


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return write_run(tmp_path / "clean", made_run(4, 60))


def told(capsys: Capture, *arguments: object) -> str:
    assert main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: object) -> str:
    assert main(["report", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_first_line_is_the_verdict_alone(capsys: Capture, late: Path) -> None:
    lines = told(capsys, late).splitlines()
    assert lines[0] == summarize(read_run(late)).verdict
    assert "of it is rank 3's input" in lines[0]
    assert lines[1] == ""


def test_blame_facts_and_advice_follow(capsys: Capture, late: Path) -> None:
    out = told(capsys, late)
    assert "rank 3 (host b) is late in 50 of the last 50 steps, by " in out
    assert "in its input, or what else comes between its optimizer and its forward pass" in " ".join(out.split())
    for name in ("overhead", "exposed", "overlap", "bus bandwidth", "stragglers"):
        assert f"\n{name}" in out


def test_a_run_that_was_begun_again_is_not_shown_without_a_word(capsys: Capture, clean: Path, tmp_path: Path) -> None:
    for rank, trace in made_run(4, 30).ranks.items():
        again = replace(trace.run, id="again", started=trace.run.started + 3600)
        with (clean / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(f"{to_json(line)}\n" for line in (again, *trace.steps))
    said = "An earlier run in this folder is not shown (steps 1 to 60, ended 2025-11-16 13:33 UTC)."
    assert f"• {said}" in told(capsys, clean)
    assert said in [each["text"] for each in json.loads(told(capsys, clean, "--json"))["warnings"]]
    told(capsys, clean, "--html", tmp_path / "run.html")
    assert said in (tmp_path / "run.html").read_text()


def test_json_has_all_that_is_printed_and_every_number(capsys: Capture, late: Path) -> None:
    answer = json.loads(told(capsys, late, "--json"))
    summary = summarize(read_run(late))
    assert answer["command"] == "report"
    assert answer["version"] == 1
    assert answer["verdict"] == summary.verdict
    assert answer["numbers"] == summary.numbers
    assert [(each["rank"], each["phase"]) for each in answer["blame"]] == [(3, "input")]


def test_only_the_last_steps_count_if_so_asked(capsys: Capture, clean: Path) -> None:
    assert json.loads(told(capsys, clean, "--last", 20, "--json"))["numbers"]["steps"] == 20


def test_two_runs_are_compared_with_the_better_one_on_top(capsys: Capture, late: Path, clean: Path) -> None:
    out = told(capsys, late, clean)
    assert out.startswith("clean is better: its step is ")
    assert "less waiting for late ranks" in out.splitlines()[0]
    answer = json.loads(told(capsys, late, clean, "--json"))
    assert [each["run"] for each in answer["runs"]] == ["late", "clean"]
    assert answer["verdict"] == out.splitlines()[0]


def test_runs_of_the_same_name_are_told_apart(capsys: Capture, tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name / "run", made_run(2, 20)) for name in "ab")
    answer = json.loads(told(capsys, first, second, "--json"))
    assert [each["run"][-5:] for each in answer["runs"]] == ["a/run", "b/run"]


def test_pages_and_timelines_are_written_on_demand(capsys: Capture, late: Path, tmp_path: Path) -> None:
    page, timeline = tmp_path / "page.html", tmp_path / "timeline.json"
    out = told(capsys, late, "--html", page, "--perfetto", timeline)
    assert f"Written: {page}" in out.replace("\n", "")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads(timeline.read_text())["traceEvents"]
    told(capsys, late, "--html", page)  # its own page may be written again


def test_what_is_wrong_with_the_arguments_is_said_in_one_sentence(
    capsys: Capture, late: Path, clean: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is no folder" in refused(capsys, tmp_path / "nowhere")
    assert "holds no trace" in refused(capsys, tmp_path)
    assert "two runs can be compared, got 3" in refused(capsys, late, clean, late)
    assert "--html shows one run" in refused(capsys, late, clean, "--html", tmp_path / "x.html")
    assert "is something else already" in refused(capsys, late, "--html", tmp_path / "notes.txt")
    assert "name a file in a folder that exists" in refused(capsys, late, "--html", tmp_path / "no" / "x.html")
    assert "name a file in a folder that exists" in refused(capsys, late, "--perfetto", tmp_path)
    assert "--last" in refused(capsys, late, "--last", "0")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_that_broke_says_so_first(capsys: Capture, tmp_path: Path) -> None:
    lost = Error(14, "PeerLost", [1], 0, "rank 1 is gone")
    out = told(capsys, write_run(tmp_path / "run", made_run(2, 30, errors={0: lost}, killed={1: 14})))
    assert out.startswith("The run broke in step 14 with PeerLost, which names rank 1.")


def test_hostile_names_reach_no_terminal(capsys: Capture, tmp_path: Path) -> None:
    evil = "\x1b[2J\r\u202e[bold]evil"
    health = (Health(3, evil, [0], evil, 1, evil),)
    run = made_run(
        2, 60, slow={1: {"input": 0.06}}, names=(evil, evil), health=health, errors={0: Error(60, evil, [1], 0, evil)}
    )
    out = told(capsys, write_run(tmp_path / "run", run))
    assert all(letter.isprintable() or letter == "\n" for letter in out)
    assert "[bold]evil" in out  # shown as it is, not taken for a style


def test_files_full_of_noise_never_end_in_a_traceback(capsys: Capture, tmp_path: Path) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        folder = write_run(tmp_path / f"run-{seed}", made_run(2, 15, seed))
        for rank in (0, 1):
            path = folder / f"rank-{rank}.jsonl"
            content = bytearray(path.read_bytes())
            header = content.index(b"\n")
            for _ in range(rng.choice([1, 50])):
                content[rng.randrange(header, len(content))] = rng.randrange(256)
            path.write_bytes(content[: rng.randrange(header + 1, len(content))])
        assert told(capsys, folder)
