"""Hierarchical where the ranks of a host share memory: only what must cross between hosts travels.

inside, in memory            across, by messages               inside, in memory
each adds up its block       each with those who answer        each fetches the others'
of all buffers here          for the same block elsewhere      finished blocks
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from gradsync.allreduce.hierarchical import Hierarchical
from gradsync.allreduce.schedule import chunk_bounds
from gradsync.exchange.rounds import Program, run, stamp
from gradsync.exchange.shared import card_of
from gradsync.kernels.library import CODES, Kind, Op
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane
from gradsync.transport.team import LANE, Team
from gradsync.transport.tickets import Ticket

_WINDOW_NBYTES = 8 << 20  # for tensors that do not live in the team's memory
_SLICE_S = 1.0


class _Part(NamedTuple):
    """For tensors of one size: where each local rank's block begins and ends, and what crosses between hosts."""

    bounds: ctypes.Array[ctypes.c_uint64]
    program: Program


class LevelRoute:
    """Inside each host in shared memory, across by messages."""

    name = "hierarchical"

    def __init__(self, lane: Lane, team: Team) -> None:
        """Every rank of the group makes it at once: it takes a window of the teams' memory."""
        self._lane = lane
        self._team = team
        self._window = team.allocate(_WINDOW_NBYTES)
        levels, rank = Hierarchical().levels(lane.hosts), lane.groups.rank
        schedule = levels.across_schedule()
        self.wire_share = schedule.share_sent_by(rank)
        blocks = [levels.blocks[member] for member in team.members]

        def part(numel: int, itemsize: int) -> _Part:
            chunks = chunk_bounds(numel, levels.num_chunks)
            borders = [chunks[block.start][0] for block in blocks] + [numel]
            return _Part((ctypes.c_uint64 * len(borders))(*borders), Program.compile(schedule, rank, numel, itemsize))

        self._part = lru_cache(maxsize=64)(part)

    def launch(self, flat: torch.Tensor, bucket: int) -> Ticket:
        mark, nbytes = stamp(self._lane.step, bucket), flat.numel() * flat.element_size()
        return self._lane.send(lambda: self.run(flat, mark), f"bucket {bucket}", nbytes, bucket)

    def run(self, flat: torch.Tensor, mark: int) -> None:
        """Now, on the lane's thread; `flat` is in host memory."""
        if not flat.numel():
            return
        if self._team.locate(flat) is not None:
            self._run_in_place(flat, mark)
            return
        each = _WINDOW_NBYTES // flat.element_size()
        window = self._window.view(flat.dtype)
        for piece in flat.split(each):
            inside = window[: piece.numel()]
            inside.copy_(piece)
            self._run_in_place(inside, mark)
            piece.copy_(inside)

    def _run_in_place(self, flat: torch.Tensor, mark: int) -> None:
        part = self._part(flat.numel(), flat.element_size())
        self._inside(Kind.SCATTER, flat, part, mark)
        run(part.program, flat, self._lane.groups.data[MESSAGES], mark)
        self._inside(Kind.GATHER, flat, part, mark)

    def _inside(self, kind: Kind, flat: torch.Tensor, part: _Part, mark: int) -> None:
        found = self._team.locate(flat)
        assert found is not None
        segment, offset = found
        op = Op(card=card_of(flat, mark, kind), count=flat.numel(), dtype=CODES[flat.dtype], scale=1.0, kind=kind)
        op.bases, op.bounds = ctypes.addressof(segment.bases(offset)), ctypes.addressof(part.bounds)
        while not self._team.advance(LANE, op, _SLICE_S):
            pass
