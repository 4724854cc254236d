"""A group's operations in shared memory, one after the other in the order in which they were issued.

One that is waited for at once is done by the caller itself, if no other is under way; all others by the team's
worker, a thread of C, beside the computation. Both use one stream of the team, so ranks need not agree on which.

Note [Order]
    What is done in shared memory keeps its order, and so do gloo's collectives. Between the two there is none, as there
    is none between two asynchronous collectives of gloo, which has two threads: whoever uses a result waits for its
    work.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from gradsync.backend.calls import Call
from gradsync.errors import Disagreement, GradSyncError
from gradsync.transport.lane import Lane
from gradsync.transport.team import WORKER, Cards, Team
from gradsync.transport.tickets import ByCaller, ByWorker, Ticket


class Queue:
    """What one rank of a group does with the others, all of one host."""

    def __init__(self, lane: Lane, team: Team) -> None:
        self.lane = lane
        self.team = team
        self._turn = threading.Lock()  # threads issue one after the other
        self._watch = threading.Lock()  # one thread at a time looks after the peers
        self._gave_up: str | None = None

    def now(self, calls: Sequence[Call], timeout: float | None) -> None:
        """Do these, in place; done when it returns."""
        with self._turn:
            idle = self.lane.idle
            if idle:
                self._do(calls, timeout)
            else:
                tickets = [self._submit(call) for call in calls]
        if not idle:
            self.settle(calls, tickets, timeout)

    def start(self, calls: Sequence[Call]) -> list[Ticket]:
        """The same, but only begun."""
        with self._turn:
            return [self._submit(call) for call in calls]

    def settle(self, calls: Sequence[Call], tickets: Sequence[Ticket], timeout: float | None) -> None:
        """Wait until all have ended, even if ranks disagree over one; then raise what went wrong."""
        disagreement: Disagreement | None = None
        for call, ticket in zip(calls, tickets, strict=True):
            try:
                self._settle(call, ticket, timeout)
            except Disagreement as error:
                disagreement = disagreement or error
        if disagreement is not None:
            raise disagreement

    def _settle(self, call: Call, ticket: Ticket, timeout: float | None) -> None:
        try:
            if ticket.landed(ticket.patience_s):
                self.lane.wait(ticket)
            else:
                with self._watch:
                    self.lane.wait(ticket, timeout)
        except Cards as error:
            ticket.refused = True
            raise self._disagreement(call.what, error.cards) from None
        except BaseException as error:
            self.give_up(error)  # Ctrl-C, say: nobody may go on from the middle of it
            raise
        call.after()

    def _do(self, calls: Sequence[Call], timeout: float | None) -> None:
        """Here, one after the other: each begins when the one before it has ended."""
        for call in calls:
            self._begin(call.what)
        self.settle(calls, [ByCaller(self.team, WORKER, call.op, call.what) for call in calls], timeout)

    def _submit(self, call: Call) -> Ticket:
        self._begin(call.what)
        _ = self.lane.idle  # looks at all that are under way, so that the lane lets go of those nobody waits for
        return self.lane.follow(ByWorker(self.team, call.op, call.keeps, call.what, call.nbytes, -1))

    def _begin(self, what: str) -> None:
        if self._gave_up is not None:
            raise GradSyncError(
                f"{self.lane.place()} {what} cannot go on after an earlier one gave up ({self._gave_up}); "
                "exit with an error, or destroy the process group and make a new one on every rank"
            )
        self.lane.step += 1

    def give_up(self, error: BaseException) -> None:
        """Nobody goes on after this: ranks no longer know where the others are."""
        self._gave_up = type(error).__name__
        if not isinstance(error, GradSyncError):  # otherwise the lane has said already who is to blame
            self.lane.fail()
        self.team.abandon()

    def _disagreement(self, what: str, cards: list[str]) -> Disagreement:
        ranks = self.lane.global_ranks(list(self.team.members))
        said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, cards, strict=True))
        return Disagreement(f"{what} was called with different tensors ({said}); every rank must bring the same")
