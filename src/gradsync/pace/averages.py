"""One average of gradients, from its departure until a later step applies it.

It may be under way, or have landed and wait; what is saved has landed.

One exchange of a flat set's flat part, from launch to arrival, with a header that makes it safe.

Ranks that are not in the same exchange find out from the header, before anything is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from gradsync.agreement.calls import Call, check_same_call, launch_header
from gradsync.agreement.header import NO_REPLICA_DIGEST, Flag, Head, Headers, Mark
from gradsync.agreement.outcome import Found, Outcome, spoiled, step_verdict
from gradsync.errors import Disagreement, NonFinite, listed
from gradsync.exchange.flat_sets import FlatPart, FlatSet
from gradsync.pace.contract import Site, State
from gradsync.transport.heartbeat import Phase
from gradsync.transport.pending import Pending


class PendingMean(NamedTuple):
    """A flat part under way."""

    flat_part: FlatPart
    number: int  # of the exchange: the lane's count when it left
    header: tuple[Pending, torch.Tensor]
    in_flight: list[Pending]


def depart(
    site: Site,
    flat_set: FlatSet,
    flat_part: FlatPart,
    weight: float = 1.0,
    flags: Flag = Flag.NONE,
    with_buffers: bool = False,
    clock: int = 0,
    marks: bytearray | None = None,
    replica_digest: bytes = NO_REPLICA_DIGEST,
    num_steps: int = -1,
) -> PendingMean:
    """Launch what the flat part holds; it was divided by the number of ranks already, so that the sum is a mean.

    `clock` is the pace's, which must be the same on every rank: see [The clock] in `contract`.
    `marks` is what the header says of the parameters, `replica_digest` of the replica, `num_steps` of the optimizers.
    """
    lane = site.lane
    lane.at(Phase.SYNCHRONIZING)
    nonfinite = -1 if site.guard.nonfinite == "allow" else first_nonfinite(flat_part)
    in_flight = flat_set.launch(flat_part)
    head = Head(lane.step, 0, weight, clock, nonfinite, 1, flags, bytes(8), Call.AVERAGE, replica_digest=replica_digest)
    head = head._replace(num_steps=num_steps)
    header = launch_header(lane, head, bytearray(site.num_marks) if marks is None else marks)
    if with_buffers:  # after the header, which may go by the same channel: a rank in another call expects one first
        site.buffers.launch(lane, 0)
    pending_mean = PendingMean(flat_part, lane.step, header, in_flight)
    lane.session.next_step()
    lane.at(Phase.COMPUTING)
    return pending_mean


def arrive(site: Site, flat_set: FlatSet, pending_mean: PendingMean, with_buffers: bool = False) -> Headers:
    """Wait until it is back: then the flat part's views hold sums. A NaN or Inf raises, unless the guard allows it."""
    headers = land(site, pending_mean, with_buffers)
    _check_finite(headers, flat_set, site)
    return headers


def land(site: Site, pending_mean: PendingMean, with_buffers: bool = False) -> Headers:
    """The same, for who judges what the headers say of NaN and Inf itself."""
    lane = site.lane
    lane.at(Phase.SYNCHRONIZING)
    site.recorder.start_waiting(any(not pending.on_host for pending in pending_mean.in_flight))
    headers = confirm(site, pending_mean)
    for each in pending_mean.in_flight:
        lane.wait(each)
    if with_buffers:
        site.buffers.finish(lane)
    _record(site, pending_mean)
    lane.at(Phase.COMPUTING)
    return headers


def _record(site: Site, pending_mean: PendingMean) -> None:
    in_flight = pending_mean.in_flight
    spans = [(pending.launched_at, pending.finished_at) for pending in in_flight if pending.finished_at]
    nbytes, sent = (
        sum(pending.nbytes for pending in in_flight),
        site.sender.traffic(pending_mean.flat_part.flat_buckets)[0],
    )
    site.recorder.finish_step(pending_mean.number, spans, nbytes, len(in_flight), None, sent)


def confirm(site: Site, pending_mean: PendingMean) -> Headers:
    """Wait until every rank has departed, in the same exchange; what they bring may still be under way."""
    pending, rows = pending_mean.header
    site.lane.wait(pending)
    headers = Headers(rows)
    check_same_call(headers, site.lane.groups.ranks)
    _check_number(headers, site)
    return headers


def _check_number(headers: Headers, site: Site) -> None:
    ranks, first = site.lane.groups.ranks, headers.heads[0]
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


def _check_finite(headers: Headers, flat_set: FlatSet, site: Site) -> None:
    if site.guard.nonfinite == "allow":
        return
    ranks = [site.lane.groups.ranks[rank] for rank, head in enumerate(headers.heads) if head.nonfinite >= 0]
    if ranks:
        first = next(head.nonfinite for head in headers.heads if head.nonfinite >= 0)
        raise NonFinite(
            f"{site.lane.place()} {listed(ranks)} brought NaN or Inf in {flat_set.names[first]}; no rank "
            "has applied this average: go back to the last checkpoint"
        )


def first_nonfinite(flat_part: FlatPart) -> int:
    """The number of the first tensor in a flat part that holds NaN or Inf, or -1."""
    if all(bool(flat_bucket.flat.sum().isfinite()) for flat_bucket in flat_part.flat_buckets):
        return -1
    return next((i for i, view in enumerate(flat_part.views) if not bool(view.isfinite().all())), -1)


_COUNTS, _DROPPED = -1, -2  # otherwise: the number of the parameter because of which it raises


class Average:
    """Of all gradients of one backward."""

    def __init__(self, views: list[torch.Tensor], scale: float, pending_mean: PendingMean | None = None) -> None:
        self.views = views
        self.scale = scale  # a GradScaler's, when the gradients were made
        self.used = bytes(len(views))  # 1 where any rank had a gradient
        self.found = ""  # where a NaN or Inf is that must be raised
        self.afterwards: Callable[[], None] = _nothing  # what all ranks do about replicas that differ
        self._fate = _COUNTS
        self._pending_mean = pending_mean

    @property
    def dropped(self) -> bool:
        """Whether it came to nothing, on every rank."""
        return self._fate != _COUNTS

    def land(self, site: Site) -> None:
        """Wait until it is back, and judge it; every rank comes to the same."""
        if self._pending_mean is None:
            return
        pending_mean, self._pending_mean = self._pending_mean, None
        headers = land(site, pending_mean)
        _check_scales(headers, site)
        self.afterwards = site.watch.hear(headers, site.lane)
        self.used = headers.any(Mark.USED)
        names = [name for name, _ in site.parameters]
        verdict, self.found = step_verdict(site.lane, site.guard, headers, names, site.health_log)
        at = next((head.nonfinite for head in headers.heads if head.nonfinite >= 0), -1)
        if verdict is Outcome.COUNTS and (at := _overflow(pending_mean.flat_part, site)) >= 0:
            overflow = f"compression made NaN or Inf of the average gradient of {names[at]}"
            verdict, self.found = spoiled(site.lane, site.guard, Found(overflow, [], names[at], None), site.health_log)
        if verdict is Outcome.COUNTS:
            site.health_log.counted()
        self._fate = {Outcome.COUNTS: _COUNTS, Outcome.DROPPED: _DROPPED, Outcome.RAISES: at}[verdict]

    def leave(self, flat_part: FlatPart, site: Site) -> None:
        """Make room, if it lies in this flat part: so many wait only after a run with a smaller k took them over."""
        if self.views is flat_part.views:
            self.land(site)
            self.views = [view.clone() for view in self.views]

    def rescale(self, scale: float) -> None:
        """As if the gradients had been made with this scale."""
        if scale != self.scale:
            torch._foreach_mul_(self.views, scale / self.scale)
            self.scale = scale

    def state(self, names: list[str]) -> State:
        """Copies, of what has landed."""
        return {
            "fate": torch.tensor(self._fate, device="cpu"),
            "scale": torch.tensor(self.scale, dtype=torch.float64, device="cpu"),
            "used": torch.tensor(list(self.used), dtype=torch.uint8, device="cpu"),
            **{f"of.{name}": view.clone() for name, view in zip(names, self.views, strict=True)},
        }

    @classmethod
    def from_state(cls, state: State, site: Site) -> Average:
        """The same, in memory of its own."""
        views = [torch.empty_like(p.detach()).copy_(state[f"of.{name}"]) for name, p in site.parameters]
        average = cls(views, float(state["scale"]))
        average.used = bytes(state["used"].tolist())
        average._fate = int(state["fate"])
        if average._fate >= 0:
            average.found = f"a rank had NaN or Inf in the gradient of {site.parameters[average._fate][0]}"
        return average


def _nothing() -> None: ...


def _check_scales(headers: Headers, site: Site) -> None:
    """Ranks that scale differently would add up unlike things."""
    ranks, first = site.lane.groups.ranks, headers.heads[0]
    for rank, head in zip(ranks, headers.heads, strict=True):
        if head.weight != first.weight:
            raise Disagreement(
                f"the GradScaler of rank {rank} has scale {head.weight:g} and that of rank {ranks[0]} "
                f"{first.weight:g}: make them alike, and load their state on every rank"
            )


def _overflow(flat_part: FlatPart, site: Site) -> int:
    """Where compression made a NaN or Inf of finite gradients, or -1."""
    if site.guard.nonfinite == "allow":
        return -1
    coded = [flat_bucket for flat_bucket in flat_part.flat_buckets if flat_bucket.choice.codec is not None]
    return -1 if all(bool(flat_bucket.flat.sum().isfinite()) for flat_bucket in coded) else first_nonfinite(flat_part)
