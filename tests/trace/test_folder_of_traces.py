"""A run's folder: written line by line, bounded, cut off, begun again, and read while it grows."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gradsync.trace.flight import NBYTES, Flight, Moment, read_flight
from gradsync.trace.lines import BucketLayout, ClockShift, RankEnd, RunHeader, StepLine, StepPart
from gradsync.trace.reader import EarlierRun, Follower, read_run
from gradsync.trace.writer import Writer

RUN = RunHeader(0, 2, "a", 7, 1.5, 2.5, "gradsync", "cpu", None, [("w", (2, 3), "float32")])


def step(number: int) -> StepLine:
    return StepLine(number, float(number), 1.0, [StepPart("wait", 0.5, 1.0)])


def test_everything_written_is_read(tmp_path: Path) -> None:
    writer = Writer(tmp_path, RUN)
    for line in (ClockShift(0, 0.5, 0.1), BucketLayout(1, []), step(0), step(1), RankEnd(2, "detach")):
        writer.write(line)
    trace = read_run(tmp_path).ranks[0]
    assert (trace.run, trace.steps, trace.end) == (RUN, [step(0), step(1)], RankEnd(2, "detach"))
    assert read_run(tmp_path).missing == [1]
    writer.close()


def test_a_line_that_was_cut_off_and_a_strange_one_are_left_out(tmp_path: Path) -> None:
    writer = Writer(tmp_path, RUN)
    writer.write(step(0))
    with writer.path.open("ab") as file:
        file.write(b'\x80\xff{"what": 1}\n{"kind":"step","step":1,"at":1')
    trace = read_run(tmp_path).ranks[0]
    assert (trace.steps, trace.num_unreadable) == ([step(0)], 1)
    writer.close()
    again = Writer(tmp_path, replace(RUN, started=9.0))  # goes on after the torn line
    again.write(step(5))
    trace = read_run(tmp_path).ranks[0]
    assert (trace.run.started, trace.steps, len(trace.earlier)) == (9.0, [step(5)], 1)
    again.close()


def test_files_stay_below_their_limit_and_the_newest_steps_are_kept(tmp_path: Path) -> None:
    writer = Writer(tmp_path, RUN, limit_nbytes=8000)
    writer.write(ClockShift(0, 0.5, 0.1))
    for number in range(500):
        writer.write(step(number))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8000 + 500
    trace = read_run(tmp_path).ranks[0]
    kept = [each.step for each in trace.steps]
    assert kept == list(range(kept[0], 500))
    assert len(kept) > 10
    assert trace.clocks[-1] == ClockShift(0, 0.5, 0.1)
    assert trace.earlier == []
    writer.close()


def test_a_follower_misses_nothing_over_a_rotation(tmp_path: Path) -> None:
    writer = Writer(tmp_path, RUN, limit_nbytes=3000)
    follower = Follower(tmp_path)
    for number in range(200):
        writer.write(step(number))
        if number % 7 == 0:
            follower.read()
    assert [each.step for each in follower.read().ranks[0].steps] == list(range(200))
    writer.close()


def test_a_follower_begins_anew_with_another_file(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    first = Writer(tmp_path, RUN)
    first.write(step(0))
    assert len(follower.read().ranks[0].steps) == 1
    first.close()
    first.path.unlink()
    second = Writer(tmp_path, replace(RUN, started=9.0))
    second.write(step(7))
    assert [each.step for each in follower.read().ranks[0].steps] == [7]
    second.close()


@pytest.mark.parametrize("content", [None, b"", b"nothing\n", b'{"kind":"step"}\n', b"\x00" * 5000])
def test_a_folder_without_a_trace_is_refused_with_a_sentence(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "rank-0.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no trace .* GRADSYNC_TRACE"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        read_run(tmp_path / "nowhere")


def test_a_disk_that_fails_ends_the_trace_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="ends here, and training goes on"):
        writer = Writer(tmp_path / "file", RUN)
    writer.write(step(0))
    full = Writer(tmp_path, RUN)
    fd = os.open("/dev/full", os.O_WRONLY)
    os.dup2(fd, full._fd)
    os.close(fd)
    with pytest.warns(UserWarning, match="No space left"):
        full.write(step(0))
    full.write(step(1))


def test_a_flight_record_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.flight"
    if not (pid := os.fork()):
        flight = Flight(path)
        for number in range(200):
            flight.note(number // 10, Moment.BUCKET_LEFT, number)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    entries = read_flight(path)
    assert [entry.bucket for entry in entries] == list(range(136, 200))
    assert entries[-1][2:] == (19, Moment.BUCKET_LEFT, 199)
    assert path.stat().st_size == NBYTES


def test_a_flight_record_that_is_none_or_half_written_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.flight"
    assert read_flight(path) == []
    path.write_bytes(b"x" * NBYTES)
    assert read_flight(path) == []
    flight = Flight(path)
    flight.note(1, Moment.FORWARD)
    flight.note(1, Moment.BACKWARD)
    content = bytearray(path.read_bytes())
    content[16 + 2 * 40] ^= 1  # the number of the second one
    path.write_bytes(content)
    assert [entry.moment for entry in read_flight(path)] == [Moment.FORWARD]
    flight.close()


def test_files_of_an_earlier_run_with_more_ranks_are_left_out(tmp_path: Path) -> None:
    for rank, name, started in ((2, "old", 1.0), (0, "new", 9.0), (1, "new", 9.1)):
        Writer(
            tmp_path, replace(RUN, rank=rank, world_size=3 if name == "old" else 2, id=name, started=started)
        ).close()
    run = read_run(tmp_path)
    assert (list(run.ranks), run.world_size, run.missing) == ([0, 1], 2, [])


def test_of_earlier_runs_it_is_known_how_far_they_came_and_when(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    for run_id, started, ranks, steps in (("a", 1000.0, 3, 4), ("b", 2000.0, 2, 0), ("c", 3000.0, 2, 2)):
        for rank in range(ranks):
            writer = Writer(tmp_path, replace(RUN, rank=rank, world_size=ranks, id=run_id, started=started + rank))
            writer.write(*map(step, range(7, 7 + steps - rank)))
            writer.close()
        assert follower.read().earlier == read_run(tmp_path).earlier
    last = 1000.0 + (10.0 + 1.0 - 2.5)  # its last step's end, where the clock said 2.5 at the beginning
    assert read_run(tmp_path).earlier == [EarlierRun([7, 10], last), EarlierRun([], 2000.0)]


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    Writer(tmp_path, RUN).close()
    other = (tmp_path / "rank-0.jsonl").read_text().replace('"format":2', '"format":3').replace('"rank":0', '"rank":1')
    (tmp_path / "rank-1.jsonl").write_text(other)
    run = read_run(tmp_path)
    assert run.missing == [1]
    assert "format 3, and this gradsync reads 2" in run.refused[1]
    (tmp_path / "rank-0.jsonl").unlink()
    with pytest.raises(ValueError, match=r"rank 1: .*format 3, and this gradsync reads 2"):
        read_run(tmp_path)


def test_a_full_disk_costs_the_flight_record_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole in the file would be a SIGBUS at the first store."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    Flight(tmp_path / "whole").close()
    assert (tmp_path / "whole").stat().st_blocks * 512 >= NBYTES
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        Flight(tmp_path / "none")
