"""Reading traces: a folder at once, or a file further and further while somebody writes it.

A file may be cut off in the middle of a line, as its rank may have been; it may also hold anything else, so lines are
bounded, and what is none of ours is counted and left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gradsync import files
from gradsync.trace.flight import FlightEntry, read_flight
from gradsync.trace.json_lines import Unreadable, from_json
from gradsync.trace.lines import (
    BucketLayout,
    ClockShift,
    Error,
    Health,
    Line,
    PlanChoice,
    RankEnd,
    RunHeader,
    SocketLines,
    Stats,
    StepLine,
)

_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,6})\.jsonl")
_MAX_LINE_NBYTES = 64 << 20  # the parameters of a very large model
_MAX_FILE_NBYTES = 4 << 30
_AT_ONCE = 1 << 20
_HEAD_NBYTES = 512
_MOST_RANKS = 1_000_000
_MOST_FOLDERS = 8  # in a sentence


class EarlierRun(NamedTuple):
    """The outline of a run whose folder a later one was given."""

    steps: list[int]  # the first and the last that are here; none if there are none
    last_seen: float  # by the wall clock: the end of the last step, or the beginning


@dataclass
class RankTrace:
    """The trace of one rank: all that it wrote."""

    run: RunHeader
    layouts: list[BucketLayout] = field(default_factory=list)
    steps: list[StepLine] = field(default_factory=list)
    clocks: list[ClockShift] = field(default_factory=list)
    socket_lines: list[SocketLines] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    choices: list[PlanChoice] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    end: RankEnd | None = None
    flight: list[FlightEntry] = field(default_factory=list)
    num_unreadable: int = 0  # lines that were none of ours
    earlier: list[EarlierRun] = field(default_factory=list)  # in the same file: it was started again

    @property
    def left_in_order(self) -> bool:
        """True if the rank ended, and not by an exception."""
        return self.end is not None and self.end.why != "exception"

    def outline(self) -> EarlierRun:
        """Return what is left of this run once another one has begun."""
        ends = [self.run.started + line.at + line.step_s - self.run.clock for line in self.steps[-1:]]
        return EarlierRun([line.step for line in (*self.steps[:1], *self.steps[-1:])], *(ends or [self.run.started]))

    def add(self, line: Line) -> None:
        """One more line."""
        match line:
            case BucketLayout():
                self.layouts.append(line)
            case StepLine():
                self.steps.append(line)
            case ClockShift():
                self.clocks.append(line)
            case SocketLines():
                self.socket_lines.append(line)
            case Stats():
                self.stats.append(line)
            case PlanChoice():
                self.choices.append(line)
            case Health():
                self.health.append(line)
            case Error():
                self.errors.append(line)
            case RankEnd():
                self.end = line


@dataclass
class RunTrace:
    """The traces of a run, by rank."""

    folder: Path
    ranks: dict[int, RankTrace]
    refused: dict[int, str] = field(default_factory=dict)  # files that are none that we read, and why

    @property
    def earlier(self) -> list[EarlierRun]:
        """The runs in the same folder before it, the last one last, as the rank tells that was in most of them."""
        return max((trace.earlier for trace in self.ranks.values()), key=len)

    @property
    def world_size(self) -> int:
        return max(trace.run.world_size for trace in self.ranks.values())

    @property
    def members(self) -> Sequence[int]:
        """The ranks that train together, whether their files are here or not."""
        return max((trace.run for trace in self.ranks.values()), key=lambda run: run.world_size).group

    @property
    def missing(self) -> list[int]:
        """Ranks whose file is not here: on another host, perhaps."""
        return [rank for rank in self.members if rank not in self.ranks]


def read_run(folder: Path) -> RunTrace:
    """Everything in a folder; ValueError with a sentence if it holds no trace."""
    return Follower(folder).read()


class Follower:
    """Reads a folder again and again; each time only what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[int, _Tail] = {}
        self._traces: dict[int, RankTrace] = {}
        self._refused: dict[int, str] = {}

    def read(self) -> RunTrace:
        """Return all that is known by now; raise ValueError with a sentence if that is no trace."""
        if not self._folder.is_dir():
            raise ValueError(f"{self._folder} is no folder; name the one given as trace= or GRADSYNC_TRACE")
        paths = self._paths()
        for rank, path in sorted(paths.items()):
            self._read_rank(rank, path)
        traces = _last_run({rank: self._traces[rank] for rank in sorted(paths) if rank in self._traces})
        refused = {rank: why for rank, why in self._refused.items() if rank in paths and rank not in traces}
        if not traces:
            if below := sorted({path.parent for path in self._folder.glob("*/rank-*.jsonl")}):
                named = ", ".join(map(str, below[:_MOST_FOLDERS]))
                raise ValueError(f"{self._folder} itself holds no trace, but there are some below it: {named}")
            why = f"rank {min(refused)}: {refused[min(refused)]}" if refused else "no rank-*.jsonl with a header"
            raise ValueError(
                f"{self._folder} holds no trace ({why}); write one "
                "with gs.attach(..., trace=folder), gs.observe(ddp, trace=folder) or GRADSYNC_TRACE=folder"
            )
        return RunTrace(self._folder, traces, refused)

    def _paths(self) -> dict[int, Path]:
        """The file of each rank."""
        try:
            return {int(name[1]): path for path in self._folder.iterdir() if (name := _NAME.fullmatch(path.name))}
        except OSError as error:
            raise ValueError(f"{self._folder} cannot be read: {error.strerror}") from None

    def _read_rank(self, rank: int, path: Path) -> None:
        tail = self._tails.setdefault(rank, _Tail(path))
        try:
            lines, restarted = tail.new_lines()
        except OSError as error:
            self._refused[rank] = f"{path.name} cannot be read: {error.strerror}"
            return
        if restarted:
            self._traces.pop(rank, None)
        unreadable = 0
        for text in lines:
            try:
                line = from_json(text)
            except Unreadable as error:
                unreadable += 1
                if text.startswith('{"kind":"run"'):
                    self._refused[rank] = str(error).partition(": {")[0]
                continue
            trace = self._traces.get(rank)
            if isinstance(line, RunHeader) and line.rank == rank and _is_possible(line):
                if trace is None or (trace.run.pid, trace.run.started) != (line.pid, line.started):
                    self._traces[rank] = RankTrace(
                        line, earlier=[] if trace is None else [*trace.earlier, trace.outline()]
                    )
            elif trace is not None:
                trace.add(line)
        if rank in self._traces:
            self._traces[rank].num_unreadable += unreadable
            self._traces[rank].flight = read_flight(path.with_name(f"rank-{rank}.flight"))


def _is_possible(run: RunHeader) -> bool:
    return run.world_size <= _MOST_RANKS and run.rank in run.group and len(run.group) == run.world_size


def _last_run(traces: dict[int, RankTrace]) -> dict[int, RankTrace]:
    """The traces of the run that began last: a folder may have been used before, by more ranks."""
    if not traces:
        return {}
    last = max(traces.values(), key=lambda trace: trace.run.started).run.id
    return {rank: trace for rank, trace in traces.items() if trace.run.id == last}


class _Tail:
    """One rank's files: the older half first, once; then the current one, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old = path.with_name(path.name.replace(".jsonl", ".old.jsonl"))
        self._identity = b""
        self._at = 0
        self._rest = bytearray()

    def new_lines(self) -> tuple[list[str], bool]:
        """Whole lines that were not there before; True if this is another file than before, not the next in turn.

        OSError if there is something that cannot be read.
        """
        identity = _identity(self._path)
        if not identity:
            return [], False
        texts: list[str] = []
        restarted = False
        if identity != self._identity:
            old = _identity_if_readable(self._old)
            if old and self._identity in (b"", old):  # the rest of what became the older half, or all of it
                texts += self._read(self._old)
            else:
                restarted = self._identity != b""
            self._identity, self._at, self._rest = identity, 0, bytearray()
        texts += self._read(self._path)
        return texts, restarted

    def _read(self, path: Path) -> list[str]:
        return list(_decoded(self._split(path)))

    def _split(self, path: Path) -> Iterator[bytes]:
        try:
            with files.open_to_read(path) as file:
                file.seek(self._at)
                while self._at < _MAX_FILE_NBYTES and (piece := file.read(_AT_ONCE)):
                    self._at += len(piece)
                    first, *lines = piece.split(b"\n")
                    self._rest += first  # in place: a line that never ends must not be copied with every piece
                    for line in lines:
                        yield bytes(self._rest)
                        self._rest = bytearray(line)
                    if len(self._rest) > _MAX_LINE_NBYTES:
                        self._rest = bytearray()
        except OSError:
            return


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    for line in lines:
        if line:
            yield line.decode("utf-8", errors="replace")


def _identity_if_readable(path: Path) -> bytes:
    """The identity of a file without which the rest can be told too."""
    try:
        return _identity(path)
    except OSError:
        return b""


def _identity(path: Path) -> bytes:
    """Return what is equal for one file while it grows, and once it has another name; nothing if there is none.

    A new file may get the number of one that was removed: so its header, which says when it began, is part of it.
    """
    try:
        with files.open_to_read(path) as file:
            head = file.readline(_HEAD_NBYTES)
            return b"%d %s" % (os.fstat(file.fileno()).st_ino, head)
    except FileNotFoundError:
        return b""
