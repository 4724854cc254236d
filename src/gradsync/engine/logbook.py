"""What a trace is told of one synchronization: when each bucket was full, left and was back. Without one, nothing."""

from __future__ import annotations

from gradsync.engine.agenda import Agenda
from gradsync.engine.bucket import Bucket
from gradsync.exchange.shipping import Shipping
from gradsync.trace.lines import BucketPlan, Layout
from gradsync.trace.spans import span
from gradsync.trace.timers import Moment
from gradsync.trace.tracer import Tracer, Trip
from gradsync.transport.lane import Lane
from gradsync.transport.tickets import Ticket


class Logbook:
    """Moments are taken on detailed steps only; names in the profiler always."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        # Of the last synchronization
        self.closed = False  # whether it came to its end
        self.trips: list[Trip] = []
        self.header_at: tuple[Moment, Moment] | None = None
        self.sent_nbytes = 0  # put on a network
        self.raw_nbytes = 0  # before compression
        self.layout: Layout | None = None  # in which it went, since when
        self._trips: list[Trip] = []  # of the one under way
        self._schedule: int | None = None  # of the layout

    def begin(self) -> None:
        """The next synchronization."""
        self._trips = []

    def filled(self, bucket: Bucket) -> None:
        """Its last gradient is there."""
        if self.tracer is not None:
            bucket.ready_at = self.tracer.detail()

    def moment(self) -> Moment | None:
        return None if self.tracer is None else self.tracer.detail()

    def left(self, bucket: Bucket, ticket: Ticket, begun: Moment | None) -> None:
        """It is under way, since `begun`."""
        if self.tracer is None:
            return
        self.tracer.left(bucket.index)
        if begun is None and bucket.choice.codec is None:
            return  # nothing of it will be told
        parcel, ready = bucket.parcel, bucket.ready_at if bucket.ready_at is not None else begun
        self._trips.append(Trip(bucket.index, ticket.nbytes, ready, begun, spans=parcel.spans))
        bucket.ready_at = None

    def wait(self, lane: Lane, tickets: list[Ticket]) -> None:
        """Wait for all buckets, in the order in which they left."""
        detailed = self.tracer is not None and self.tracer.detailed and len(self._trips) == len(tickets)
        for number, ticket in enumerate(tickets):
            begun = self.moment() if detailed else None
            if self.tracer is not None and not ticket.succeeded:
                self.tracer.waiting(ticket.bucket)
            with span("wait", ticket.bucket):
                lane.wait(ticket)
            if detailed:
                trip = self._trips[number]
                trip.wait_from, trip.wait_to = begun, self.moment()
                trip.done = ticket.finished_at or trip.wait_to

    def header_left(self) -> None:
        now = self.moment()
        self.header_at = None if now is None else (now, now)

    def header_came(self) -> None:
        if self.tracer is not None and self.header_at is not None:
            self.header_at = (self.header_at[0], self.tracer.timer.now())

    def close(self, agenda: Agenda, shipping: Shipping, step: int) -> None:
        """All buckets are back. What went is noted now: for the next synchronization they may be others."""
        self.trips = self._trips
        if self.tracer is None:
            return
        parcels = [bucket.parcel for bucket in agenda.buckets]
        self.sent_nbytes = round(sum([shipping.sent_nbytes(parcel, step) for parcel in parcels]))
        if agenda.schedule != self._schedule:
            self._schedule = agenda.schedule
            self.raw_nbytes = sum(parcel.raw_nbytes for parcel in parcels)
            self.layout = Layout(step, [_plan(bucket) for bucket in agenda.buckets])


def _plan(bucket: Bucket) -> BucketPlan:
    label = bucket.choice.label if bucket.choice.codec else None
    return BucketPlan(bucket.index, [entry.index for entry in bucket.entries], bucket.nbytes, label)
