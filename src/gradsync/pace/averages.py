"""The mean of a flat part over the ranks, from its launch until it is used, with a header that makes it safe.

    launch_mean ─▶ wait_header ─▶ wait_mean ─▶ finish_mean        each does what those before it do

Ranks that are not in the same exchange find out from the header, before anything is used. An `Average` is one of
gradients, from its launch until a later step applies it: it may be under way, or be back; what is saved is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from gradsync.agreement.calls import Call, check_same_call
from gradsync.agreement.header import (
    ALIKE,
    ALIKE_IN_SCALE,
    NO_REPLICA_DIGEST,
    Flag,
    Head,
    HeaderExchange,
    Headers,
    Mark,
    Note,
)
from gradsync.agreement.outcome import Found, Outcome, spoiled, step_outcome
from gradsync.errors import Disagreement, NonFinite, listed
from gradsync.exchange.flat_sets import FlatPart, FlatSet
from gradsync.pace.contract import PaceContext, State
from gradsync.transport.heartbeat import Phase
from gradsync.transport.pending import Pending


class PendingMean(NamedTuple):
    """A flat part under way."""

    flat_part: FlatPart
    number: int  # of the exchange: the lane's count when it left
    header: HeaderExchange
    in_flight: list[Pending]


def launch_mean(
    context: PaceContext,
    flat_set: FlatSet,
    flat_part: FlatPart,
    weight: float = 1.0,
    flags: int = Flag.NONE,
    with_buffers: bool = False,
    clock: int = 0,
    marks: bytearray | None = None,
    replica_digest: bytes = NO_REPLICA_DIGEST,
    num_steps: int = -1,
    alike: int = ALIKE,
) -> PendingMean:
    """Launch what the flat part holds; it was divided by the number of ranks already, so that the sum is a mean.

    `clock` is the pace's, which must be the same on every rank: see [The clock] in `contract`.
    `marks` is what the header says of the parameters, `replica_digest` of the replica, `num_steps` of the optimizers;
    `alike` are the fields in which headers must not differ.
    """
    lane = context.lane
    lane.at(Phase.SYNCHRONIZING)
    nonfinite = -1 if context.guard.nonfinite == "allow" else first_nonfinite(flat_part)
    in_flight = flat_set.launch(flat_part)
    head = Head(lane.step, 0, weight, clock, nonfinite, 1, flags, bytes(8), Call.AVERAGE, replica_digest=replica_digest)
    head = head._replace(num_steps=num_steps)
    header = HeaderExchange(lane, head, bytes(context.num_marks) if marks is None else marks, alike)
    if with_buffers:  # after the header, which may go by the same channel: a rank in another call expects one first
        context.buffers.launch(lane, 0)
    pending_mean = PendingMean(flat_part, lane.step, header, in_flight)
    lane.session.next_step()
    return pending_mean


def finish_mean(
    context: PaceContext, flat_set: FlatSet, pending_mean: PendingMean, with_buffers: bool = False
) -> Headers:
    """Wait until it is back: then the flat part's views hold sums. A NaN or Inf raises, unless the guard allows it."""
    headers = wait_mean(context, pending_mean, with_buffers)
    _check_finite(headers, flat_set, context)
    return headers


def wait_mean(context: PaceContext, pending_mean: PendingMean, with_buffers: bool = False) -> Headers:
    """Wait until it is back, and leave it to the caller to judge what the headers say of NaN and Inf."""
    lane = context.lane
    lane.at(Phase.SYNCHRONIZING)
    context.recorder.start_waiting(any(not pending.on_host for pending in pending_mean.in_flight))
    headers = wait_header(context, pending_mean)
    for each in pending_mean.in_flight:
        lane.wait(each)
    if with_buffers:
        context.buffers.finish(lane)
    sent_nbytes, _ = context.sender.traffic(pending_mean.flat_part.flat_buckets)
    context.recorder.finish(pending_mean.number, pending_mean.in_flight, sent_nbytes=sent_nbytes)
    lane.at(Phase.COMPUTING)
    return headers


def wait_header(context: PaceContext, pending_mean: PendingMean) -> Headers:
    """Wait until every rank has launched, in the same exchange; what they bring may still be under way."""
    headers = pending_mean.header.receive()
    check_same_call(headers, context.lane.groups.ranks)
    _check_number(headers, context)
    return headers


def _check_number(headers: Headers, context: PaceContext) -> None:
    if not headers.differ_in(ALIKE):
        return
    ranks, first = context.lane.groups.ranks, headers.heads[0]
    for rank, head in zip(ranks, headers.heads, strict=True):
        if head.step != first.step:
            raise Disagreement(
                f"rank {rank} is in exchange {head.step} of its pace and rank {ranks[0]} in {first.step}: they did "
                "not call backward or drain() equally often"
            )
        if head.backwards != first.backwards:
            raise Disagreement(
                f"rank {rank} has run {head.backwards} backward calls and rank {ranks[0]} {first.backwards} in "
                f"exchange {first.step} of their pace: call backward and drain() equally often on every rank"
            )


def _check_finite(headers: Headers, flat_set: FlatSet, context: PaceContext) -> None:
    if context.guard.nonfinite == "allow" or not headers.notes & Note.NONFINITE:
        return
    ranks = [context.lane.groups.ranks[rank] for rank, head in enumerate(headers.heads) if head.nonfinite >= 0]
    if ranks:
        first = next(head.nonfinite for head in headers.heads if head.nonfinite >= 0)
        raise NonFinite(
            f"{context.lane.place()} {listed(ranks)} brought NaN or Inf in {flat_set.names[first]}; no rank "
            "has applied this average: go back to the last checkpoint"
        )


def first_nonfinite(flat_part: FlatPart) -> int:
    """The number of the first tensor in a flat part that holds NaN or Inf, or -1."""
    if all(bool(flat_bucket.flat.sum().isfinite()) for flat_bucket in flat_part.flat_buckets):
        return -1
    return next((i for i, view in enumerate(flat_part.views) if not bool(view.isfinite().all())), -1)


_COUNTS, _DROPPED = -1, -2  # otherwise: the number of the parameter because of which it raises


class Average:
    """The average of all gradients of one backward."""

    def __init__(self, views: list[torch.Tensor], scale: float, pending_mean: PendingMean | None = None) -> None:
        self.views = views
        self.scale = scale  # a GradScaler's, when the gradients were made
        self.used = bytes(len(views))  # 1 where any rank had a gradient
        self.found = ""  # where a NaN or Inf is that must be raised
        self.after_drift_check: Callable[[], None] = _nothing  # what all ranks do about replicas that differ
        self._outcome = _COUNTS
        self._pending_mean = pending_mean
        self._headers: Headers | None = None  # what came with it, until it is heard

    @property
    def dropped(self) -> bool:
        """True if this average came to nothing, on every rank."""
        return self._outcome != _COUNTS

    def wait(self, context: PaceContext) -> None:
        """Wait until it is back, and judge it; every rank comes to the same."""
        if self._pending_mean is None:
            return
        pending_mean, self._pending_mean = self._pending_mean, None
        headers = wait_mean(context, pending_mean)
        _check_scales(headers, context)
        self._headers = headers
        self.used = headers.any(Mark.USED)
        names = [name for name, _ in context.parameters]
        outcome, self.found = step_outcome(context.lane, context.guard, headers, names, context.health_log)
        told = headers.heads if headers.notes & Note.NONFINITE else []
        at = next((head.nonfinite for head in told if head.nonfinite >= 0), -1)
        if outcome is Outcome.COUNTS and (at := _overflow(pending_mean.flat_part, context)) >= 0:
            overflow = f"compression made NaN or Inf of the average gradient of {names[at]}"
            found = Found(overflow, [], names[at], None)
            outcome, self.found = spoiled(context.lane, context.guard, found, context.health_log)
        if outcome is Outcome.COUNTS:
            context.health_log.counted()
        self._outcome = {Outcome.COUNTS: _COUNTS, Outcome.DROPPED: _DROPPED, Outcome.RAISES: at}[outcome]

    def hear(self, context: PaceContext) -> None:
        """Wait for it, and compare replicas by its headers: every rank does so between the same two of its launches.

        A rank may wait alone, to save its state, say; but which digest is said next depends on those heard so far.
        """
        self.wait(context)
        headers, self._headers = self._headers, None
        if headers is not None:
            self.after_drift_check = context.drift_check.hear(headers, context.lane)

    def move_out_of(self, flat_part: FlatPart, context: PaceContext) -> None:
        """Make room, if it lies in this flat part: so many wait only after a run with a smaller k took them over."""
        if self.views is flat_part.views:
            self.wait(context)
            self.views = [view.clone() for view in self.views]

    def rescale(self, scale: float) -> None:
        """Scale it as if the gradients had been made with this scale."""
        if scale != self.scale:
            torch._foreach_mul_(self.views, scale / self.scale)
            self.scale = scale

    def state(self, names: list[str]) -> State:
        """Copies of what is back."""
        return {
            "fate": torch.tensor(self._outcome, device="cpu"),
            "scale": torch.tensor(self.scale, dtype=torch.float64, device="cpu"),
            "used": torch.tensor(list(self.used), dtype=torch.uint8, device="cpu"),
            **{f"of.{name}": view.clone() for name, view in zip(names, self.views, strict=True)},
        }

    @classmethod
    def from_state(cls, state: State, context: PaceContext) -> Average:
        """An average that was saved, in memory of its own."""
        views = [torch.empty_like(p.detach()).copy_(state[f"of.{name}"]) for name, p in context.parameters]
        average = cls(views, float(state["scale"]))
        average.used = bytes(state["used"].tolist())
        average._outcome = int(state["fate"])
        if average._outcome >= 0:
            average.found = f"a rank had NaN or Inf in the gradient of {context.parameters[average._outcome][0]}"
        return average


def _nothing() -> None: ...


def _check_scales(headers: Headers, context: PaceContext) -> None:
    """Ranks that scale differently would add up unlike things."""
    if not headers.differ_in(ALIKE_IN_SCALE):
        return
    ranks, first = context.lane.groups.ranks, headers.heads[0]
    for rank, head in zip(ranks, headers.heads, strict=True):
        if head.weight != first.weight:
            raise Disagreement(
                f"the GradScaler of rank {rank} has scale {head.weight:g} and that of rank {ranks[0]} "
                f"{first.weight:g}: make them alike, and load their state on every rank"
            )


def _overflow(flat_part: FlatPart, context: PaceContext) -> int:
    """The number of the parameter in which compression made a NaN or Inf of finite gradients, or -1."""
    if context.guard.nonfinite == "allow":
        return -1
    coded = [flat_bucket for flat_bucket in flat_part.flat_buckets if flat_bucket.choice.codec is not None]
    return -1 if all(bool(flat_bucket.flat.sum().isfinite()) for flat_bucket in coded) else first_nonfinite(flat_part)
