"""A group's sums in shared memory, one after the other in the order in which they were issued.

A sum that is waited for at once is made by the caller itself, if no other is under way; all others by the team's
worker, a thread of C, beside the computation. Both use one stream of the team, so ranks need not agree on which.

Note [Order]
    Sums of a group keep their order, and so do gloo's collectives. Between the two there is none, as there is none
    between two asynchronous collectives of gloo, which has two threads: whoever uses a result waits for its work.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from gradsync.errors import Disagreement, GradSyncError
from gradsync.kernels.library import CODES
from gradsync.transport.lane import Lane
from gradsync.transport.team import WORKER, Cards, Team
from gradsync.transport.tickets import OwnSum, TeamSum, Ticket

ReduceOp = Any  # torch's, whose fields its stubs do not declare

_ADDS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def summable(tensors: Sequence[torch.Tensor], op: ReduceOp) -> bool:
    """Whether shared memory can do it; it depends only on what is equal on all ranks.

    Strides do not matter: like gloo we add up `numel` elements from where the tensor begins.
    """
    if op.op not in _ADDS or torch._C._len_torch_dispatch_stack():  # a mode wants to see what torch dispatches
        return False
    # Subclasses may have no memory of their own (FakeTensor, AsyncCollectiveTensor).
    return all(
        type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout == torch.strided and tensor.dtype in CODES
        for tensor in tensors
    )


class Sums:
    """What one rank of a group adds up with the others, all of one host."""

    def __init__(self, lane: Lane, team: Team) -> None:
        self.lane = lane
        self._team = team
        self._turn = threading.Lock()  # threads issue one after the other
        self._watch = threading.Lock()  # one thread at a time looks after the peers
        self._gave_up: str | None = None

    def now(self, tensors: Sequence[torch.Tensor], op: ReduceOp, timeout: float | None) -> None:
        """Add up these tensors over the ranks, in place; done when it returns."""
        with self._turn:
            if self.lane.idle:
                self._add_up(tensors, op, timeout)
                return
            tickets = [self._submit(tensor, op) for tensor in tensors]
        for ticket in tickets:
            self.settle(ticket, timeout)

    def start(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[Ticket]:
        """The same, but only begun."""
        with self._turn:
            return [self._submit(tensor, op) for tensor in tensors]

    def settle(self, ticket: Ticket, timeout: float | None) -> None:
        """Wait until it has ended, and raise what went wrong."""
        try:
            if ticket.landed(ticket.patience_s):
                self.lane.wait(ticket)
            else:
                with self._watch:
                    self.lane.wait(ticket, timeout)
        except Cards as error:
            raise self._disagreement(error.cards) from None
        except BaseException as error:
            self.give_up(error)  # Ctrl-C, say: nobody may go on from the middle of it
            raise

    def _add_up(self, tensors: Sequence[torch.Tensor], op: ReduceOp, timeout: float | None) -> None:
        """Here, all of them, even if ranks disagree over one: others may have given theirs to the worker already."""
        disagreement: Disagreement | None = None
        for tensor in tensors:
            try:
                self._own(tensor, op, timeout)
            except Disagreement as error:
                disagreement = disagreement or error
        if disagreement is not None:
            raise disagreement

    def _own(self, tensor: torch.Tensor, op: ReduceOp, timeout: float | None) -> None:
        self._begin()
        card, scale = _card(tensor.numel(), tensor.dtype, op.op), self._scale(op)
        ticket = OwnSum(self._team, WORKER, self._team.sum_op(tensor, card, scale, in_place=False), "all_reduce")
        self.settle(ticket, timeout)

    def _submit(self, tensor: torch.Tensor, op: ReduceOp) -> Ticket:
        self._begin()
        card, scale = _card(tensor.numel(), tensor.dtype, op.op), self._scale(op)
        operation = self._team.sum_op(tensor, card, scale, in_place=False)
        _ = self.lane.idle  # looks at all that are under way, so that the lane lets go of those nobody waits for
        return self.lane.follow(TeamSum(self._team, operation, tensor, "all_reduce", tensor.nbytes, -1))

    def _scale(self, op: ReduceOp) -> float:
        return 1.0 / self._team.size if op.op == dist.ReduceOp.AVG else 1.0

    def _begin(self) -> None:
        if self._gave_up is not None:
            raise GradSyncError(
                f"{self.lane.place()} all_reduce cannot go on after an earlier one gave up ({self._gave_up}); "
                "exit with an error, or destroy the process group and make a new one on every rank"
            )
        self.lane.step += 1

    def give_up(self, error: BaseException) -> None:
        """Nobody goes on after this: ranks no longer know where the others are."""
        self._gave_up = type(error).__name__
        if not isinstance(error, GradSyncError):  # otherwise the lane has said already who is to blame
            self.lane.fail()
        self._team.abandon()

    def _disagreement(self, cards: list[str]) -> Disagreement:
        ranks = self.lane.global_ranks(list(self._team.members))
        said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, cards, strict=True))
        return Disagreement(f"all_reduce was called with different tensors ({said}); every rank must bring the same")


@lru_cache(maxsize=1024)
def _card(numel: int, dtype: torch.dtype, kind: object) -> bytes:
    """What ranks compare before they touch anything."""
    return f"{numel} {str(dtype).removeprefix('torch.')} {str(kind).rpartition('.')[2]}".encode()
