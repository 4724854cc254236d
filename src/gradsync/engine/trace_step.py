"""The trace of an attached model: opens it, and tells it what the engine knows of each step."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import sys
import time
import zlib
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradsync.engine.bucket import GradEntry
from gradsync.engine.clock_offset import measure_offset
from gradsync.engine.hooks import weakly
from gradsync.engine.socket_use import SocketUse
from gradsync.engine.step import Synchronization
from gradsync.engine.sync_timeline import SyncTimeline
from gradsync.errors import PeerFault
from gradsync.trace import Recorder
from gradsync.trace.flight import Flight
from gradsync.trace.lines import BucketLayout, BucketPlan, ClockShift, Health, RunHeader
from gradsync.trace.timers import timer_for
from gradsync.trace.tracer import BucketMoments, Tracer
from gradsync.trace.writer import Writer
from gradsync.transport.blame import lost
from gradsync.transport.lane import Lane

_ALIGN_EVERY = 1000  # synchronizations
_WIRES_EVERY = 20
_SPELT_OUT = 8  # ranks in the name of a folder
_open: set[Path] = set()  # files of this process: two models need two


def wanted(trace: str | os.PathLike[str] | None) -> Path | None:
    """The folder to trace to: the one given, or that of GRADSYNC_TRACE; None for none."""
    if trace is None:
        trace = os.environ.get("GRADSYNC_TRACE") or None
    if trace is not None and not isinstance(trace, str | os.PathLike):
        raise TypeError(f"trace must be the path of a folder, got {trace!r}")
    return None if trace is None else Path(trace)


class TraceAgreement(NamedTuple):
    """The agreement of the ranks before any of them writes."""

    together: bool  # every rank traces
    run_id: str  # the same on all


def agree_on_trace(lane: Lane, folder: Path | None) -> TraceAgreement:
    """Compare what ranks want; every rank calls this at once, whether it traces or not."""
    rows = lane.exchange(bytes([folder is not None]) + os.urandom(8))
    return TraceAgreement(all(row[0] for row in rows), rows[0][1:].hex())


def open_tracer(
    folder: Path, lane: Lane, entries: list[GradEntry], plan: dict[str, Any] | None, source: str, run_id: str
) -> Tracer:
    """Open this rank's file and flight record in `folder`; a folder below if another model of this process has it."""
    rank = lane.groups.ranks[lane.groups.rank]
    devices = {entry.param.device for entry in entries}
    members = tuple(sorted(lane.groups.ranks))
    home = folder if len(members) == dist.get_world_size() else folder / _folder_of(members)
    base, number = home, 1
    while (base / f"rank-{rank}.jsonl").absolute() in _open:
        number += 1
        base = home / f"model-{number}"
    _open.add((base / f"rank-{rank}.jsonl").absolute())
    now, clock = time.time(), time.perf_counter()
    parameters = [
        (entry.name, tuple(entry.param.shape), str(entry.param.dtype).removeprefix("torch.")) for entry in entries
    ]
    run = RunHeader(
        rank, lane.groups.size, platform.node(), os.getpid(), now, clock, source, _device_name(devices), plan,
        parameters, _version(), torch.__version__, run_id,
        members=None if members == tuple(range(len(members))) else members,
    )  # fmt: skip
    writer = Writer(base, run)
    return Tracer(writer, _flight(base / f"rank-{rank}.flight"), timer_for(devices))


class Tracing:
    """The listener that writes the trace: of a GradSync, or of what integrations tell it."""

    def __init__(
        self, tracer: Tracer, lane: Lane, together: bool, sockets: Collection[tuple[int, str]] | None = None
    ) -> None:
        """`together`: every rank traces, so that they may compare their clocks. `sockets`: if not the lane's own."""
        self.tracer = tracer
        self._lane = lane
        self._together = together
        self._synchronization: Synchronization | None = None
        self._timeline: SyncTimeline | None = None
        self._failed = False
        self._over = False
        self._layout: list[BucketPlan] = []  # that was written last
        self._aligned_at = -_ALIGN_EVERY
        self._links = SocketUse(lane, lane.groups.sockets if sockets is None else sockets)
        if together:
            self._links.know_peers()
        self._align(lane)
        self._at_exit = weakly(self._exit)
        atexit.register(self._at_exit)

    def follow(self, synchronization: Synchronization, recorder: Recorder) -> None:
        """Hear of what this one does from now on; every rank calls this at once."""
        if synchronization.lane is not self._lane:
            self._change_links(synchronization.lane)
        if self._synchronization is None:
            synchronization.health_log.listen(self.tracer.health)  # the same one under every plan
        self._synchronization, self._lane = synchronization, synchronization.lane
        recorder.tell(self.tracer.waited)
        self._timeline = SyncTimeline(self.tracer, synchronization.listeners, synchronization.sender)
        synchronization.lane.notice(self._noticed)

    def continue_at(self, step: int) -> None:
        """A state was loaded: the count of synchronizations goes on there."""
        if self._synchronization is not None:
            self.tracer.continue_at(step)

    # As a listener of a loop's steps, see `moments_of`; its timeline hears of synchronizations, the tracer of the rest

    def border(self) -> None:
        if self._synchronization is not None and self._synchronization.lane.step >= self._aligned_at + _ALIGN_EVERY:
            self._align(self._synchronization.lane)

    def synchronized(self, counts: bool) -> None:
        synchronization, told = self._synchronization, self._timeline
        if synchronization is None or told is None or self._lane.session.failed is not None:
            return  # it failed: the error has its own line
        if told.layout is not None:
            self.write_layout(told.layout)
        self.tracer.over(
            synchronization.lane.step - 1,
            not synchronization.dropped,
            told.trips,
            told.header_at,
            told.sent_nbytes,
            told.raw_nbytes,
        )
        self._look_at_sockets()

    def step_ended(self) -> None:
        self.over(self.tracer.count)

    def over(self, step: int, trips: Iterable[BucketMoments] = ()) -> None:
        """A step of which the synchronization knows nothing is over."""
        self.tracer.over(step, counts=True, buckets=trips)
        self._look_at_sockets()

    def write_layout(self, layout: BucketLayout) -> None:
        """Write the buckets from now on, if they are other ones than before."""
        if layout.buckets is not self._layout and layout.buckets != self._layout:
            self._layout = layout.buckets
            self.tracer.write(layout)

    def failed(self, error: BaseException) -> None:
        ranks = error.ranks if isinstance(error, PeerFault) else ()
        self._failed = True
        self.tracer.error(error, ranks, self._lane.session.stuck_bucket)

    def close(self) -> None:
        """The model is detached."""
        self._close("detach")

    def __del__(self) -> None:
        """Nobody has the model any more, and nobody closed it."""
        if not self._over:
            with contextlib.suppress(Exception):
                self._close("dropped")

    # Small things

    def _change_links(self, lane: Lane) -> None:
        """Another plan has groups of its own, and so other connections."""
        self._write_sockets()
        self._links = SocketUse(lane, lane.groups.sockets)
        if self._together:
            self._links.know_peers()

    def _align(self, lane: Lane) -> None:
        self._aligned_at = lane.step
        if self._together:
            offset = measure_offset(lane)
            self.tracer.write(ClockShift(lane.step, offset.offset_s, offset.error_s))

    def _look_at_sockets(self) -> None:
        if self.tracer.count % _WIRES_EVERY == 0:
            self._write_sockets()

    def _write_sockets(self) -> None:
        line = self._links.since_last(self.tracer.step)
        if line is not None:
            self.tracer.write(line)

    def _noticed(self, text: str, ranks: list[int]) -> None:
        self.tracer.health(Health(self.tracer.step, "late", ranks, None, None, text))

    def _exit(self) -> None:
        """The process ends with the model attached: by an exception, or just so."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self._failed:
            self.tracer.error(error, self._lane.global_ranks(lost(self._lane.liveness.peer_views(), self._lane.step)))
        self._close("exception" if error is not None else "exit")

    def _close(self, why: str) -> None:
        self._over = True
        atexit.unregister(self._at_exit)
        self._write_sockets()
        _open.discard(self.tracer.writer.path.absolute())
        self.tracer.close(why)


def _flight(path: Path) -> Flight | None:
    try:
        return Flight(path)
    except OSError:
        return None  # the writer has said that this folder cannot be written


def _folder_of(members: Sequence[int]) -> str:
    """The folder of ranks that train apart from the others.

    >>> _folder_of([2, 3, 4]), _folder_of([1]), _folder_of([0, 2])
    ('ranks-2-to-4', 'ranks-1', 'ranks-0-2')
    """
    first, last = members[0], members[-1]
    if last - first == len(members) - 1:
        return f"ranks-{first}" if first == last else f"ranks-{first}-to-{last}"
    if len(members) <= _SPELT_OUT:
        return f"ranks-{'-'.join(map(str, members))}"
    return f"ranks-{first}-to-{last}-{zlib.crc32(repr(list(members)).encode()):08x}"


def _device_name(devices: set[torch.device]) -> str:
    names = [
        f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
        for device in sorted(devices, key=str)
    ]
    return ", ".join(names)


def _version() -> str:
    try:
        return version("gradsync")
    except PackageNotFoundError:
        return "(from a folder)"
