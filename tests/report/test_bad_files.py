"""Files that are none, or never end, in every place where a command or a call is pointed at a file: one sentence."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsync as gs
from gradsync.cli.main import main
from gradsync.cluster import Cluster, Link
from gradsync.integrations import rank_files
from gradsync.planner.profile import Gradient, ModelProfile
from gradsync.trace.flight import Flight, read_flight
from gradsync.trace.reader import read_run
from gradsync.trace.writer import Writer
from made_runs import made_run, write_run

pytestmark = pytest.mark.timeout(60)

# No regular files: these are refused for reading and for writing.
NOT_FILES = ("fifo", "socket", "folder")
# What is more: nobody reads them.
UNREADABLE = (*NOT_FILES, "zero", "stdin", "huge", "letters", "secret", "loop")


@pytest.fixture
def make() -> Iterator[Callable[[str, Path], Path]]:
    """Puts a bad file of a kind at a path."""
    opened: list[Any] = []

    def put(kind: str, path: Path) -> Path:
        path.unlink(missing_ok=True)
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "socket":
                opened.append(socket.socket(socket.AF_UNIX))
                here = os.getcwd()
                os.chdir(path.parent)  # a socket's address is short
                opened[-1].bind(path.name)
                os.chdir(here)
            case "folder":
                path.mkdir()
            case "zero":
                path.symlink_to("/dev/zero")
            case "stdin":  # a pipe that is open for writing and never ends
                reading, writing = os.pipe()
                opened.extend((os.fdopen(reading), os.fdopen(writing, "w")))
                path.symlink_to(f"/proc/self/fd/{reading}")
            case "huge":
                with open(path, "wb") as file:
                    file.truncate(300 << 20)
            case "letters":
                path.write_bytes(b"\xff\xfe[x")
            case "secret":
                path.write_text("x = 1")
                path.chmod(0)
                if os.access(path, os.R_OK):
                    pytest.skip("whoever runs this may read everything")
            case "loop":
                path.symlink_to(path)
        return path

    yield put
    for each in opened:
        each.close()


def headline(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one sentence of a command that could not."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "10000")
        code = main([str(each) for each in arguments])
    told = capsys.readouterr()
    assert code == 2, told
    assert told.err.count("\n") - told.err.count("Waiting for") == 1, told.err
    return told.err


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("command", [("report",), ("watch", "--terminal", "--patience", "0s"), ("doctor",)], ids=str)
def test_a_trace_that_is_no_file(
    tmp_path: Path,
    make: Callable[[str, Path], Path],
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    kind: str,
) -> None:
    make(kind, tmp_path / "rank-0.jsonl")
    told = headline(capsys, command[0], tmp_path, *command[1:])
    assert "holds no trace (" in told
    assert kind in ("huge", "letters") or "rank 0: rank-0.jsonl cannot be read: " in told
    if kind in NOT_FILES:
        assert "not a regular file" in told


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", ["rank-0.jsonl", "rank-0.old.jsonl", "rank-0.flight"])
def test_the_other_ranks_are_read_all_the_same(
    tmp_path: Path, make: Callable[[str, Path], Path], kind: str, name: str
) -> None:
    folder = write_run(tmp_path / "run", made_run(2, 20))
    make(kind, folder / name)
    run = read_run(folder)
    assert 1 in run.ranks
    assert len(run.ranks[1].steps) == 20
    assert (0 in run.ranks) == (name != "rank-0.jsonl")


def test_a_link_to_a_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made_run(2, 20))
    (folder / "rank-0.jsonl").rename(tmp_path / "elsewhere")
    (folder / "rank-0.jsonl").symlink_to(tmp_path / "elsewhere")
    assert len(read_run(folder).ranks[0].steps) == 20


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("option", ["--cluster", "--profile", "plan.toml", "cluster.toml", "profile.toml"])
def test_what_a_plan_is_made_from(
    tmp_path: Path, make: Callable[[str, Path], Path], capsys: pytest.CaptureFixture[str], option: str, kind: str
) -> None:
    folder = write_run(tmp_path / "run", made_run(2, 20))
    link = Link(20e-6, 10e6)
    Cluster(((0,), (1,)), link, link, calibrated=True).save(folder / "cluster.toml")
    ModelProfile((Gradient("a", (500, 500), torch.float32, 0.2),), 0.1, 0.2, 0.01).save(folder / "profile.toml")
    gs.Plan().save(folder / "plan.toml")
    if option.startswith("--"):
        bad = make(kind, tmp_path / "bad.toml")
        more = ("--params", "1e7") if option == "--cluster" else ("--gpus", "8")
        told = headline(capsys, "plan", option, bad, *more)
    else:
        bad = make(kind, folder / option)
        told = headline(capsys, "plan", "--check", folder)
    assert str(bad) in told
    assert "is not a TOML file" in told if kind == "letters" else "cannot be read" in told


@pytest.mark.parametrize("kind", [*NOT_FILES, "loop"])
@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--gpus", "8", "--params", "1e7", "--out"),
        ("plan", "--gpus", "8", "--params", "1e7", "--html"),
        ("report", "RUN", "--html"),
        ("report", "RUN", "--perfetto"),
        ("report", "RUN", "--prometheus"),
        ("report", "RUN", "--tensorboard"),
        ("bench", "--draw", "ring", "--svg"),
        ("bench", "--plot"),
        ("probe", "--out"),
    ],
    ids=lambda command: f"{command[0]} {command[-1]}",
)
def test_where_results_would_be_written(
    tmp_path: Path,
    make: Callable[[str, Path], Path],
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    kind: str,
) -> None:
    if command[-1] == "--tensorboard" and kind == "folder":
        pytest.skip("it wants a folder")
    folder = write_run(tmp_path / "run", made_run(2, 20)) if "RUN" in command else tmp_path
    bad = make(kind, tmp_path / "result")
    told = headline(capsys, *(folder if each == "RUN" else each for each in command), bad)
    assert f"{bad} cannot be written" in told


def test_a_device_takes_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "8", "--params", "1e7", "--out", "/dev/null"]) == 0


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_token_that_is_in_no_file(
    tmp_path: Path, make: Callable[[str, Path], Path], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    bad = make(kind, tmp_path / "token")
    told = headline(capsys, "watch", tmp_path, "--token-file", bad)
    assert f"--token-file {bad} " in told


@pytest.mark.parametrize("kind", [kind for kind in UNREADABLE if kind != "letters"])
@pytest.mark.parametrize("load", [gs.Plan.load, Cluster.load, ModelProfile.load], ids=lambda load: load.__qualname__)
def test_what_calls_load(
    tmp_path: Path, make: Callable[[str, Path], Path], load: Callable[[Path], object], kind: str
) -> None:
    with pytest.raises(OSError, match="bad"):
        load(make(kind, tmp_path / "bad"))
    with pytest.raises(ValueError, match="cannot be read"):
        gs.auto(cluster=tmp_path / "bad")


@pytest.mark.parametrize("kind", NOT_FILES)
def test_a_trace_is_not_written_into_what_is_no_file(
    tmp_path: Path, make: Callable[[str, Path], Path], kind: str
) -> None:
    make(kind, tmp_path / "rank-0.jsonl")
    with pytest.warns(UserWarning, match=r"rank-0.jsonl ends here, and training goes on"):
        Writer(tmp_path, made_run(1, 1).ranks[0].run).close()
    flight = make(kind, tmp_path / "rank-0.flight")
    with pytest.raises(OSError):
        Flight(flight)
    assert read_flight(flight) == []


@pytest.mark.parametrize("kind", [kind for kind in UNREADABLE if kind not in ("huge", "letters")])
def test_a_checkpoint_whose_part_is_no_file(tmp_path: Path, make: Callable[[str, Path], Path], kind: str) -> None:
    make(kind, tmp_path / "gradsync-rank0.safetensors")
    with pytest.raises(OSError, match=r"gradsync-rank0\.safetensors"):
        rank_files.read(tmp_path, 0, 1)
