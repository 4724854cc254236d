"""Hierarchical where the ranks of a host share memory: only what must cross between hosts travels.

inside, in memory            across, by messages               inside, in memory
each adds up its block       each with those who answer        each fetches the others'
of all buffers here          for the same block elsewhere      finished blocks
"""

from __future__ import annotations

import ctypes
from collections import deque
from functools import lru_cache
from typing import NamedTuple

import torch

from gradsync.algorithms.hierarchical import Hierarchical
from gradsync.algorithms.schedule import chunk_bounds
from gradsync.exchange.routes import card_of
from gradsync.exchange.schedule_runner import Program, run, stamp
from gradsync.kernels.library import CODES, Op, OpKind
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Errand, Pending
from gradsync.transport.shared_memory import LANE, Team

_LEAST_NBYTES, _MOST_NBYTES = 2 << 20, 8 << 20  # of a part
_NUM_PARTS = 3  # under way at a time
_SLICE_S = 1.0


class _Plan(NamedTuple):
    """For parts of one size: where each local rank's block begins and ends, and what crosses between hosts."""

    bounds: ctypes.Array[ctypes.c_uint64]
    program: Program


class _Part(NamedTuple):
    """A part under way."""

    given: torch.Tensor  # of the tensor
    inside: torch.Tensor  # the same, in the team's memory
    plan: _Plan
    across: Errand


class LevelRoute:
    """Inside each host in shared memory, across by messages."""

    name = "hierarchical"

    def __init__(self, lane: Lane, team: Team) -> None:
        """Every rank of the group makes it at once: it takes a window of the teams' memory."""
        self._lane = lane
        self._team = team
        self._windows = team.allocate(_NUM_PARTS * _MOST_NBYTES)[: _NUM_PARTS * _MOST_NBYTES].split(_MOST_NBYTES)
        self._wire = lane.hire()
        levels, rank = Hierarchical().levels(lane.hosts), lane.groups.rank
        schedule = levels.across_schedule()
        self.wire_share = schedule.share_sent_by(rank)
        blocks = [levels.blocks[member] for member in team.members]

        def plan(numel: int, itemsize: int) -> _Plan:
            chunks = chunk_bounds(numel, levels.num_chunks)
            borders = [chunks[block.start][0] for block in blocks] + [numel]
            return _Plan((ctypes.c_uint64 * len(borders))(*borders), Program.compile(schedule, rank, numel, itemsize))

        self._plan = lru_cache(maxsize=64)(plan)

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        mark, nbytes = stamp(self._lane.today, bucket), flat.numel() * flat.element_size()
        return self._lane.send(lambda: self.run(flat, mark), f"bucket {bucket}", nbytes, bucket)

    def run(self, flat: torch.Tensor, mark: int) -> None:
        """Now, on the lane's thread; `flat` is in host memory."""
        if not flat.numel():
            return
        in_place = self._team.locate(flat) is not None
        nbytes = flat.numel() * flat.element_size()
        each = min(_MOST_NBYTES, max(_LEAST_NBYTES, nbytes // _NUM_PARTS)) // flat.element_size()
        under_way: deque[_Part] = deque()
        for number, given in enumerate(flat.split(each)):
            if len(under_way) == _NUM_PARTS:
                self._finish(under_way.popleft(), mark)
            inside = given if in_place else self._copy_in(given, number)
            under_way.append(self._begin(given, inside, mark))
        for part in under_way:
            self._finish(part, mark)

    def _copy_in(self, given: torch.Tensor, number: int) -> torch.Tensor:
        window = self._windows[number % _NUM_PARTS].view(given.dtype)[: given.numel()]
        return window.copy_(given)

    def _begin(self, given: torch.Tensor, inside: torch.Tensor, mark: int) -> _Part:
        plan = self._plan(given.numel(), given.element_size())
        self._in_memory(OpKind.SCATTER, inside, plan, mark)
        channel = self._lane.groups.data[MESSAGES]
        # Parts share the mark: they follow each other on the wire, and messages of one pair keep their order.
        across = Errand(lambda: run(plan.program, inside, channel, mark), "messages across hosts", 0, -1)
        self._wire.take(across)
        return _Part(given, inside, plan, across)

    def _finish(self, part: _Part, mark: int) -> None:
        while not part.across.landed(_SLICE_S):
            pass  # it ends: the channel's own timeout bounds it, and whoever gives up cuts the wires
        part.across.settle()
        self._in_memory(OpKind.GATHER, part.inside, part.plan, mark)
        if part.inside is not part.given:
            part.given.copy_(part.inside)

    def _in_memory(self, kind: OpKind, flat: torch.Tensor, plan: _Plan, mark: int) -> None:
        found = self._team.locate(flat)
        assert found is not None
        segment, offset = found
        op = Op(card=card_of(flat, mark, kind), count=flat.numel(), dtype=CODES[flat.dtype], scale=1.0, kind=kind)
        op.bases, op.bounds = ctypes.addressof(segment.bases(offset)), ctypes.addressof(plan.bounds)
        while not self._team.advance(LANE, op, _SLICE_S):
            pass
