"""The backend's own all-reduce.

In shared memory: the team's worker makes the sum beside the computation.

By sends and receives: a schedule's rounds, one after the other, on the lane's thread (NCCL: on a stream).
"""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from gradsync.algorithms.schedule import Recipe
from gradsync.exchange.schedule_runner import Program, run, stamp
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane
from gradsync.transport.pending import ByWorker, OnStream, Pending
from gradsync.transport.shared_memory import LANE, Team


class NativeRoute:
    """One collective per tensor; the backend does the rest."""

    name = "native"

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        # What any all-reduce must send at least: rings and NCCL send just that.
        self.wire_share = 2 * (lane.groups.size - 1) / lane.groups.size

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        channel = self._lane.groups.data[flat.device.type]
        if channel.on_host and flat.dtype == torch.int16:
            raise ValueError("gloo cannot add int16; use int32, or gs.shared_memory() on one host")
        nbytes = flat.numel() * flat.element_size()
        return self._lane.launch(lambda: channel.sum(flat), f"bucket {bucket}", nbytes, bucket, channel.on_host)


_SLICE_S = 1.0


class SharedRoute:
    """One C call per tensor: in place where it lives in the team's memory, else through windows."""

    name = "shared_memory"
    wire_share = 0.0

    def __init__(self, lane: Lane, team: Team) -> None:
        self._lane = lane
        self._team = team

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        op = self._team.sum_op(flat, card_of(flat, self._lane.today, bucket))
        nbytes = flat.numel() * flat.element_size()
        try:
            return self._lane.follow(ByWorker(self._team, op, flat, f"bucket {bucket}", nbytes, bucket))
        except MemoryError as error:
            raise RuntimeError(str(error)) from error

    def run(self, flat: torch.Tensor, stamp: int) -> None:
        """The same, now, on the lane's thread."""
        op = self._team.sum_op(flat, card_of(flat, stamp, 0))
        while not self._team.advance(LANE, op, _SLICE_S):
            pass


def card_of(flat: torch.Tensor, step: int, bucket: int) -> bytes:
    """What ranks compare before they touch anything."""
    return f"bucket {bucket} step {step % 10**6}: {flat.numel()} {str(flat.dtype).removeprefix('torch.')}".encode()


_NAME = re.compile(r"(?<=[a-z])(?=[A-Z])")  # HalvingDoubling is halving_doubling


class MessageRoute:
    """Runs a recipe's schedule."""

    def __init__(self, lane: Lane, recipe: Recipe) -> None:
        self.name = _NAME.sub("_", type(recipe).__name__).lower()
        self._lane = lane
        schedule, rank = recipe.schedule(lane.hosts), lane.groups.rank
        self.wire_share = schedule.share_sent_by(rank)
        self._program = lru_cache(maxsize=64)(lambda numel, itemsize: Program.compile(schedule, rank, numel, itemsize))

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        mark, nbytes = stamp(self._lane.today, bucket), flat.numel() * flat.element_size()
        if flat.device.type != "cpu":
            channel = self._lane.groups.data[flat.device.type]
            program = self._program(flat.numel(), flat.element_size())
            return OnStream(flat, lambda: run(program, flat, channel, mark), f"bucket {bucket}", nbytes, bucket)
        return self._lane.send(lambda: self.run(flat, mark), f"bucket {bucket}", nbytes, bucket)

    def run(self, flat: torch.Tensor, mark: int) -> None:
        """Now, on the lane's thread; `flat` is in host memory."""
        program = self._program(flat.numel(), flat.element_size())
        run(program, flat, self._lane.groups.data[MESSAGES], mark)
