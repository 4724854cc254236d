"""By sends and receives: a schedule's rounds, one after the other, on the lane's thread (NCCL: on a stream)."""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from gradsync.allreduce.schedule import Recipe
from gradsync.exchange.rounds import Program, run, stamp
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane
from gradsync.transport.tickets import OnStream, Ticket

_NAME = re.compile(r"(?<=[a-z])(?=[A-Z])")  # HalvingDoubling is halving_doubling


class MessageRoute:
    """Runs a recipe's schedule."""

    def __init__(self, lane: Lane, recipe: Recipe) -> None:
        self.name = _NAME.sub("_", type(recipe).__name__).lower()
        self._lane = lane
        schedule, rank = recipe.schedule(lane.hosts), lane.groups.rank
        self.wire_share = schedule.share_sent_by(rank)
        self._program = lru_cache(maxsize=64)(lambda numel, itemsize: Program.compile(schedule, rank, numel, itemsize))

    def launch(self, flat: torch.Tensor, bucket: int) -> Ticket:
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
