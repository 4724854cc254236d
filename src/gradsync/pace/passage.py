"""One exchange of a fleet's ship, from launch to arrival, with a header that makes it safe.

Ranks that are not in the same exchange find out from the header, before anything is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gradsync.errors import Disagreement, NonFinite, listed
from gradsync.exchange.fleet import Fleet, Ship
from gradsync.guard.calls import Call, check_same_call, launch_header
from gradsync.guard.header import NO_VITALS, Flag, Head, Headers
from gradsync.pace.contract import Site
from gradsync.transport.page import Phase
from gradsync.transport.tickets import Ticket


class Passage(NamedTuple):
    """A ship under way."""

    ship: Ship
    number: int  # of the exchange: the lane's count when it left
    header: tuple[Ticket, torch.Tensor]
    tickets: list[Ticket]


def depart(
    site: Site,
    fleet: Fleet,
    ship: Ship,
    weight: float = 1.0,
    flags: Flag = Flag.NONE,
    with_buffers: bool = False,
    clock: int = 0,
    marks: bytearray | None = None,
    vitals: bytes = NO_VITALS,
    num_steps: int = -1,
) -> Passage:
    """Launch what the ship holds; it was divided by the number of ranks already, so that the sum is a mean.

    `clock` is the pace's, which must be the same on every rank: see [The clock] in `contract`.
    `marks` is what the header says of the parameters, `vitals` of the replica, `num_steps` of the optimizers.
    """
    lane = site.lane
    lane.at(Phase.SYNCHRONIZING)
    nonfinite = -1 if site.guard.nonfinite == "allow" else first_nonfinite(ship)
    tickets = fleet.launch(ship)
    head = Head(lane.step, 0, weight, clock, nonfinite, 1, flags, bytes(8), Call.AVERAGE, vitals=vitals)
    head = head._replace(num_steps=num_steps)
    header = launch_header(lane, head, bytearray(site.num_marks) if marks is None else marks)
    if with_buffers:  # after the header, which may go by the same channel: a rank in another call expects one first
        site.buffers.launch(lane, 0)
    passage = Passage(ship, lane.step, header, tickets)
    lane.step += 1
    lane.at(Phase.COMPUTING)
    return passage


def arrive(site: Site, fleet: Fleet, passage: Passage, with_buffers: bool = False) -> Headers:
    """Wait until it is back: then the ship's views hold sums. A NaN or Inf raises, unless the guard allows it."""
    headers = land(site, passage, with_buffers)
    _check_finite(headers, fleet, site)
    return headers


def land(site: Site, passage: Passage, with_buffers: bool = False) -> Headers:
    """The same, for who judges what the headers say of NaN and Inf itself."""
    lane = site.lane
    lane.at(Phase.SYNCHRONIZING)
    site.recorder.start_waiting(any(not ticket.on_host for ticket in passage.tickets))
    headers = confirm(site, passage)
    for each in passage.tickets:
        lane.wait(each)
    if with_buffers:
        site.buffers.finish(lane)
    _record(site, passage)
    lane.at(Phase.COMPUTING)
    return headers


def _record(site: Site, passage: Passage) -> None:
    tickets = passage.tickets
    spans = [(ticket.launched_at, ticket.finished_at) for ticket in tickets if ticket.finished_at]
    nbytes, sent = sum(ticket.nbytes for ticket in tickets), site.shipping.wire(passage.ship.parcels)[0]
    site.recorder.finish_step(passage.number, spans, nbytes, len(tickets), None, sent)


def confirm(site: Site, passage: Passage) -> Headers:
    """Wait until every rank has departed, in the same exchange; what they bring may still be under way."""
    ticket, rows = passage.header
    site.lane.wait(ticket)
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


def _check_finite(headers: Headers, fleet: Fleet, site: Site) -> None:
    if site.guard.nonfinite == "allow":
        return
    ranks = [site.lane.groups.ranks[rank] for rank, head in enumerate(headers.heads) if head.nonfinite >= 0]
    if ranks:
        first = next(head.nonfinite for head in headers.heads if head.nonfinite >= 0)
        raise NonFinite(
            f"{site.lane.place()} {listed(ranks)} brought NaN or Inf in {fleet.names[first]}; no rank has applied this "
            "average: go back to the last checkpoint"
        )


def first_nonfinite(ship: Ship) -> int:
    """The number of the first tensor in a ship that holds NaN or Inf, or -1."""
    if all(bool(parcel.flat.sum().isfinite()) for parcel in ship.parcels):
        return -1
    return next((i for i, view in enumerate(ship.views) if not bool(view.isfinite().all())), -1)
