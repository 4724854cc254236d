"""`gradsync watch`: waits for a run, follows it in a terminal or on a page, and ends as it should."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from gradsync.cli.main import main
from gradsync.cli.shared import BadInput
from gradsync.cli.watch import terminal
from gradsync.cli.watch.command import await_run
from gradsync.report.live.feed import FeedReader
from gradsync.report.live.run_state import state_of
from gradsync.trace.lines import Error, RankEnd
from gradsync.trace.reader import read_run
from hostile_names import HOSTILE, hostile_folder
from live_server import BOUND_S, Client, finish, grow
from made_runs import made_run, write_run


def acts(*actions: Callable[[], None]) -> Callable[[float], None]:
    """Instead of sleeping: what others do meanwhile, one thing at a time."""
    rest: Iterator[Callable[[], None]] = iter(actions)

    def sleep(_: float) -> None:
        next(rest)()

    return sleep


def followed(folder: Path, *actions: Callable[[], None], is_terminal: bool = False) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=100, highlight=False, color_system=None)
    reader = FeedReader(folder)
    terminal.watch(reader, reader.look(), console, acts(*actions))
    return output.getvalue()


def test_without_a_terminal_every_update_is_a_line_and_the_end_ends_it(tmp_path: Path) -> None:
    grow(tmp_path, 20)
    told = followed(tmp_path, lambda: grow(tmp_path, 21), lambda: None, lambda: finish(tmp_path, 21)).splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "running, step 20",
        "running, step 21",
        "the run ended after step 21",
    ]


def test_in_a_terminal_the_verdict_the_ranks_and_the_overhead_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, made_run(3, 60, slow={1: {"input": 0.05}}))
    told = followed(tmp_path, is_terminal=True)
    assert "rank 1's input" in told
    assert "the run ended after step 60" in told
    rows = [line.split() for line in told.splitlines() if line[:1].isdigit()][-3:]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    late = [float(row[6]) for row in rows]
    assert late[1] > 40
    assert max(late[0], late[2]) < 5
    assert "█" in told


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_name_moves_the_cursor(tmp_path: Path, is_terminal: bool) -> None:
    for number, text in enumerate(HOSTILE):
        told = followed(hostile_folder(tmp_path / str(number), text), is_terminal=is_terminal)
        ours = told.replace("\x1b[?25l", "").replace("\x1b[?25h", "").replace("\x1b[1A", "").replace("\x1b[2K", "")
        assert all(letter.isprintable() or letter in "\r\n" for letter in ours)


def test_many_ranks_fit_and_the_latest_are_among_them(tmp_path: Path) -> None:
    write_run(tmp_path, made_run(40, 12, slow={33: {"input": 0.05}}))
    told = followed(tmp_path, is_terminal=True)
    assert "24 ranks that are less late are left out" in told
    assert any(line.startswith("33 ") for line in told.splitlines())


def test_a_run_that_begins_later_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    _, update = await_run(folder, 60.0, acts(lambda: None, folder.mkdir, lambda: grow(folder, 3)))
    assert update.state.text == "running, step 3"
    assert capsys.readouterr().err.count("Waiting for a run to begin") == 1


def test_patience_ends(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"is no folder.*waited"):
        await_run(tmp_path / "never", 1e-9, acts())


def test_a_run_stands_as_its_last_words_say() -> None:
    run = made_run(2, 9)
    assert state_of(run, 1e6).text == "the run ended after step 9"
    failed = made_run(2, 9, errors={0: Error(9, "PeerLost", [1], 0, "gone"), 1: Error(9, "PeerLost", [1], 0, "gone")})
    assert state_of(failed, 0.0) == ("failed", "the run failed in step 9: PeerLost")
    for trace in failed.ranks.values():
        trace.end = RankEnd(9, "exception")  # an exception that nobody catches ends the process in its own way
    assert state_of(failed, 0.0) == ("failed", "the run failed in step 9: PeerLost")
    killed = made_run(2, 9, errors={0: Error(9, "PeerLost", [1], 0, "gone")}, killed={1: 9})
    assert state_of(killed, 0.0).kind == "failed"
    run.ranks[1].end = None
    assert state_of(run, 0.0) == ("live", "running, step 9")
    assert state_of(run, 31.0) == ("quiet", "no news for 30 s, after step 9")


def test_silence_is_measured_from_the_files(tmp_path: Path) -> None:
    grow(tmp_path, 5)
    for path in tmp_path.glob("*.jsonl"):
        os.utime(path, (1e9, 1e9))
    assert FeedReader(tmp_path).look().state.kind == "quiet"


def test_a_file_that_is_missing_means_that_the_run_may_go_on(tmp_path: Path) -> None:
    write_run(tmp_path, made_run(2, 9))
    (tmp_path / "rank-1.jsonl").unlink()
    assert not state_of(read_run(tmp_path), 0.0).over
    # But not for ever: whose files are here have all ended, and nobody writes.
    ended = ("ended", "1 of 2 ranks (no files of the others) ended after step 9")
    assert state_of(read_run(tmp_path), 31.0) == ended


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["watch"], "RUN"),
        (["watch", "{}/none", "--patience", "0s"], "is no folder"),
        (["watch", "{}", "--patience", "0s"], "holds no trace"),
        (["watch", "{}/file", "--patience", "1h"], "is no folder"),
        (["watch", "{}", "--patience", "soon"], "'soon' is no time"),
        (["watch", "{}", "--port", "70000"], "from 0 to 65535"),
        (["watch", "{}", "--terminal", "--port", "80"], "leave them out"),
        (["watch", "{}/run", "--token-file", "{}/none"], "--token-file"),
        (["watch", "{}/run", "--token-file", "{}/file"], "can be read by others: chmod 600"),
        (["watch", "{}/run", "--token-file", "{}/secret"], "must hold 16 to 128 letters"),
        (["watch", "{}/run", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["watch", "{}/run", "--host", "no such host"], "cannot listen on no such host"),
    ],
)
def test_bad_input_ends_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0o644)
    (tmp_path / "secret").write_text("short\n")
    (tmp_path / "secret").chmod(0o600)
    grow(tmp_path / "run", 2)
    assert main([each.format(tmp_path) for each in arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("gradsync watch: ")
    assert len(error.splitlines()) == 1


def test_a_port_that_is_taken_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grow(tmp_path, 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["watch", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "name another --port" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_its_libraries_the_command_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in [name for name in sys.modules if name.startswith((f"{missing}.", "gradsync.report.live."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["watch", str(tmp_path)]) == 2
    assert "pip install 'gradsync[report]'" in capsys.readouterr().err


def test_the_command_prints_its_address_serves_it_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    grow(tmp_path, 5)
    # A shell starts background jobs with SIGINT ignored, and children inherit that: listen again.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from gradsync.cli.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "watch", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        url = said.removeprefix("Open ").strip()
        client = Client(_Elsewhere(url))
        client.enter()
        assert "running, step 5" in client.ask().text
        with client.events() as events:
            next(events)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=BOUND_S)
        assert process.returncode == 130
        assert error == "It follows the run until Ctrl-C.\n"
    finally:
        process.kill()
        process.communicate()


class _Elsewhere:
    """A server in another process, by its address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.address = url.partition("#")[0]
