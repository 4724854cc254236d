"""The routes by which a flat tensor is summed over the ranks. All but one need what ranks do to be alike everywhere.

NativeRoute         the backend's own all-reduce
SharedRoute         in the memory that ranks of one host share: the team's worker adds up, beside the computation
MessageRoute        a schedule's rounds of sends and receives, on the lane's thread (NCCL: on a stream)
HierarchicalRoute   only what must cross between hosts travels, on the lane's thread:

    inside, in memory            across, by messages               inside, in memory
    each adds up its block       each with those who answer        each fetches the others'
    of all buffers here          for the same block elsewhere      finished blocks
"""

from __future__ import annotations

import ctypes
import re
from collections import deque
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import torch

from gradsync.algorithms.check import check
from gradsync.algorithms.hierarchical import Hierarchical
from gradsync.algorithms.schedule import Recipe, Schedule, chunk_bounds
from gradsync.cluster import Hosts
from gradsync.errors import GradSyncError
from gradsync.exchange.schedule_runner import Program, run, stamp
from gradsync.kernels.library import CODES, Op, OpKind
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane
from gradsync.transport.pending import ByWorker, LaneTask, Pending
from gradsync.transport.shared_memory import LANE, Team, label_of
from gradsync.transport.stream_work import StreamWork, run_on_stream
from gradsync.transport.waiting import first_line

_SLICE_S = 1.0
Bounds = ctypes.Array[ctypes.c_uint64]


class SumRoute(Protocol):
    """A way for a flat tensor to be summed over the ranks."""

    @property
    def name(self) -> str: ...

    @property
    def sent_share(self) -> float:
        """The share of a tensor's bytes that this rank sends over a network, as a factor."""

    @property
    def sums_in_team_memory(self) -> bool:
        """True if a tensor in team memory is summed where it lies, wholly or in part."""

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        """Start; `flat` holds the sum when the pending is settled."""


class HostRoute(SumRoute, Protocol):
    """A way for tensors in host memory, which another route may use for its pieces."""

    def run(self, flat: torch.Tensor, tag: int) -> None:
        """Sum it now, on the lane's thread."""


class NativeRoute:
    """One collective per tensor; the backend does the rest."""

    name = "native"
    sums_in_team_memory = False

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        # What any all-reduce must send at least: rings and NCCL send just that.
        self.sent_share = 2 * (lane.groups.size - 1) / lane.groups.size

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        channel = self._lane.groups.data[flat.device.type]
        if channel.on_host and flat.dtype == torch.int16:
            raise ValueError("gloo cannot add int16; use int32, or gs.shared_memory() on one host")
        return self._lane.launch(lambda: channel.sum(flat), f"bucket {bucket}", flat.nbytes, bucket)


class SharedRoute:
    """One C call per tensor: in place where it lies in the team's memory, else through windows."""

    name = "shared_memory"
    sent_share = 0.0
    sums_in_team_memory = True

    def __init__(self, lane: Lane, team: Team) -> None:
        self._lane = lane
        self._team = team

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        op = self._team.sum_op(flat, label_of(flat, self._lane.current_step, bucket))
        try:
            return self._lane.follow(ByWorker(self._team, op, flat, f"bucket {bucket}", flat.nbytes, bucket))
        except MemoryError as error:
            raise RuntimeError(str(error)) from error

    def run(self, flat: torch.Tensor, tag: int) -> None:
        _advance(self._team, self._team.sum_op(flat, label_of(flat, tag, 0)))


def share_blocks(team: Team, kind: OpKind, flat: torch.Tensor, bounds: Bounds, label: bytes) -> None:
    """Do what `kind` says with the blocks between `bounds` of a tensor in the team's memory, on the lane's thread."""
    found = team.locate(flat)
    assert found is not None
    segment, offset = found
    op = Op(label=label, count=flat.numel(), dtype=CODES[flat.dtype], scale=1.0, kind=kind)
    op.bases, op.bounds = ctypes.addressof(segment.bases(offset)), ctypes.addressof(bounds)
    _advance(team, op)


def _advance(team: Team, op: Op) -> None:
    while not team.advance(LANE, op, _SLICE_S):
        pass  # it ends when a peer dies or gives up


def checked(recipe: Recipe, hosts: Hosts) -> Schedule:
    """The recipe's schedule for these hosts; an error in words if that is none, or does not add up."""
    name = type(recipe).__name__
    try:
        schedule = recipe.schedule(hosts)
    except Exception as error:
        raise GradSyncError(
            f"the algorithm {name} raised {type(error).__name__} in {name}.schedule({hosts}): {first_line(error)}; "
            "correct its code, or name another algorithm in the plan"
        ) from error
    if not isinstance(schedule, Schedule):
        raise TypeError(f"{name}.schedule must return a gradsync.algorithms.schedule.Schedule, got {schedule!r}")
    size = sum(map(len, hosts))
    if schedule.world_size != size:
        raise ValueError(f"{name}.schedule is for {schedule.world_size} ranks, but the group has {size}")
    if type(recipe).__module__.partition(".")[0] != __name__.partition(".")[0]:  # ours are proved by tests
        try:
            check(schedule)
        except ValueError as error:
            raise ValueError(f"{name}.schedule does not make every rank's sum: {error}") from None
    return schedule


_NAME = re.compile(r"(?<=[a-z])(?=[A-Z])")  # HalvingDoubling is halving_doubling


class MessageRoute:
    """Runs a recipe's schedule."""

    sums_in_team_memory = False

    def __init__(self, lane: Lane, recipe: Recipe) -> None:
        self.name = _NAME.sub("_", type(recipe).__name__).lower()
        self._lane = lane
        schedule, rank = checked(recipe, lane.hosts), lane.groups.rank
        self.sent_share = schedule.share_sent_by(rank)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of GPUs
        compiled = lru_cache(maxsize=64)(partial(Program.compile, schedule, rank))
        self._program = compiled
        # NCCL cuts messages itself; several to one rank in a batch would wait for each other.
        self._uncut = lambda numel, itemsize: compiled(numel, itemsize, max(1, numel * itemsize))

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        tag = stamp(self._lane.current_step, bucket)
        if flat.device.type != "cpu":
            return self._lane.launch(lambda: self._run_on_stream(flat, tag), f"bucket {bucket}", flat.nbytes, bucket)
        return self._lane.send(lambda: self.run(flat, tag), f"bucket {bucket}", flat.nbytes, bucket)

    def run(self, flat: torch.Tensor, tag: int) -> None:
        program = self._program(flat.numel(), flat.element_size())
        run(program, flat, self._lane.groups.gloo(MESSAGES), tag)

    def _run_on_stream(self, flat: torch.Tensor, tag: int) -> StreamWork:
        channel, program = self._lane.groups.data[flat.device.type], self._uncut(flat.numel(), flat.element_size())
        if flat.device not in self._streams:
            self._streams[flat.device] = torch.cuda.Stream(flat.device)
        return run_on_stream(self._streams[flat.device], lambda: run(program, flat, channel, tag), flat)


_LEAST_NBYTES, _MOST_NBYTES = 2 << 20, 8 << 20  # of a part
_NUM_PARTS = 3  # under way at a time


class _Division(NamedTuple):
    """The division of parts of one size: where each local rank's block lies, and what crosses between hosts."""

    bounds: Bounds
    program: Program


class _Part(NamedTuple):
    """A part under way."""

    given: torch.Tensor  # of the tensor
    inside: torch.Tensor  # the same, in the team's memory
    division: _Division
    across: LaneTask


class HierarchicalRoute:
    """Sums inside each host in shared memory, and across by messages."""

    name = "hierarchical"
    sums_in_team_memory = True

    def __init__(self, lane: Lane, team: Team) -> None:
        """Every rank of the group makes it at once: it takes a window of the teams' memory."""
        self._lane = lane
        self._team = team
        self._windows = team.allocate(_NUM_PARTS * _MOST_NBYTES)[: _NUM_PARTS * _MOST_NBYTES].split(_MOST_NBYTES)
        self._wire = lane.hire()
        levels, rank = Hierarchical().levels(lane.hosts), lane.groups.rank
        schedule = levels.across_schedule()
        self.sent_share = schedule.share_sent_by(rank)
        blocks = [levels.blocks[member] for member in team.members]

        def divide(numel: int, itemsize: int) -> _Division:
            chunks = chunk_bounds(numel, levels.num_chunks)
            borders = [chunks[block.start][0] for block in blocks] + [numel]
            program = Program.compile(schedule, rank, numel, itemsize)
            return _Division((ctypes.c_uint64 * len(borders))(*borders), program)

        self._divide = lru_cache(maxsize=64)(divide)

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        tag = stamp(self._lane.current_step, bucket)
        return self._lane.send(lambda: self.run(flat, tag), f"bucket {bucket}", flat.nbytes, bucket)

    def run(self, flat: torch.Tensor, tag: int) -> None:
        if not flat.numel():
            return
        in_place = self._team.locate(flat) is not None
        each = min(_MOST_NBYTES, max(_LEAST_NBYTES, flat.nbytes // _NUM_PARTS)) // flat.element_size()
        under_way: deque[_Part] = deque()
        for number, given in enumerate(flat.split(each)):
            if len(under_way) == _NUM_PARTS:
                self._finish(under_way.popleft(), tag)
            inside = given if in_place else self._copy_in(given, number)
            under_way.append(self._begin(given, inside, tag))
        for part in under_way:
            self._finish(part, tag)

    def _copy_in(self, given: torch.Tensor, number: int) -> torch.Tensor:
        window = self._windows[number % _NUM_PARTS].view(given.dtype)[: given.numel()]
        return window.copy_(given)

    def _begin(self, given: torch.Tensor, inside: torch.Tensor, tag: int) -> _Part:
        division = self._divide(given.numel(), given.element_size())
        self._in_memory(OpKind.SCATTER, inside, division, tag)
        channel = self._lane.groups.gloo(MESSAGES)
        # Parts share the tag: they follow each other on the wire, and messages of one pair keep their order.
        across = LaneTask(lambda: run(division.program, inside, channel, tag), "messages across hosts", 0, -1)
        self._wire.take(across)
        return _Part(given, inside, division, across)

    def _finish(self, part: _Part, tag: int) -> None:
        while not part.across.landed(_SLICE_S):
            pass  # it ends: the channel's own timeout bounds it, and whoever gives up cuts the connections
        part.across.settle()
        self._in_memory(OpKind.GATHER, part.inside, part.division, tag)
        if part.inside is not part.given:
            part.given.copy_(part.inside)

    def _in_memory(self, kind: OpKind, flat: torch.Tensor, division: _Division, tag: int) -> None:
        share_blocks(self._team, kind, flat, division.bounds, label_of(flat, tag, kind))
