"""In shared memory: the team's worker makes the sum beside the computation."""

from __future__ import annotations

import torch

from gradsync.transport.lane import Lane
from gradsync.transport.team import LANE, Team
from gradsync.transport.tickets import ByWorker, Ticket

_SLICE_S = 1.0


class SharedRoute:
    """One C call per tensor: in place where it lives in the team's memory, else through windows."""

    name = "shared_memory"
    wire_share = 0.0

    def __init__(self, lane: Lane, team: Team) -> None:
        self._lane = lane
        self._team = team

    def launch(self, flat: torch.Tensor, bucket: int) -> Ticket:
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
