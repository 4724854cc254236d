"""What a trace is told of one synchronization: when each bucket was full, left and was back. Without one, nothing."""

from __future__ import annotations

from gradsync.engine.bucket import Bucket
from gradsync.engine.bucket_order import BucketOrder
from gradsync.exchange.sender import Sender
from gradsync.trace.lines import BucketLayout, BucketPlan
from gradsync.trace.timers import Moment, span
from gradsync.trace.tracer import BucketMoments, Tracer
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Pending


class Logbook:
    """Moments are taken on detailed steps only; names in the profiler always."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        # Of the last synchronization
        self.closed = False  # whether it came to its end
        self.trips: list[BucketMoments] = []
        self.header_at: tuple[Moment, Moment] | None = None
        self.sent_nbytes = 0  # put on a network
        self.raw_nbytes = 0  # before compression
        self.layout: BucketLayout | None = None  # in which it went, since when
        self._trips: list[BucketMoments] = []  # of the one under way
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

    def left(self, bucket: Bucket, pending: Pending, begun: Moment | None) -> None:
        """It is under way, since `begun`."""
        if self.tracer is None:
            return
        self.tracer.left(bucket.index)
        if begun is None and bucket.choice.codec is None:
            return  # nothing of it will be told
        flat_bucket, ready = bucket.flat_bucket, bucket.ready_at if bucket.ready_at is not None else begun
        self._trips.append(BucketMoments(bucket.index, pending.nbytes, ready, begun, spans=flat_bucket.spans))
        bucket.ready_at = None

    def wait(self, lane: Lane, in_flight: list[Pending]) -> None:
        """Wait for all buckets, in the order in which they left."""
        detailed = self.tracer is not None and self.tracer.detailed and len(self._trips) == len(in_flight)
        for number, pending in enumerate(in_flight):
            begun = self.moment() if detailed else None
            if self.tracer is not None and not pending.succeeded:
                self.tracer.waiting(pending.bucket)
            with span("wait", pending.bucket):
                lane.wait(pending)
            if detailed:
                trip = self._trips[number]
                trip.wait_from, trip.wait_to = begun, self.moment()
                trip.done = pending.finished_at or trip.wait_to

    def header_left(self) -> None:
        now = self.moment()
        self.header_at = None if now is None else (now, now)

    def header_came(self) -> None:
        if self.tracer is not None and self.header_at is not None:
            self.header_at = (self.header_at[0], self.tracer.timer.now())

    def close(self, bucket_order: BucketOrder, sender: Sender, step: int) -> None:
        """All buckets are back. What went is noted now: for the next synchronization they may be others."""
        self.trips = self._trips
        if self.tracer is None:
            return
        flat_buckets = [bucket.flat_bucket for bucket in bucket_order.buckets]
        self.sent_nbytes = round(sum([sender.sent_nbytes(flat_bucket, step) for flat_bucket in flat_buckets]))
        if bucket_order.schedule != self._schedule:
            self._schedule = bucket_order.schedule
            self.raw_nbytes = sum(flat_bucket.raw_nbytes for flat_bucket in flat_buckets)
            self.layout = BucketLayout(step, [_plan(bucket) for bucket in bucket_order.buckets])


def _plan(bucket: Bucket) -> BucketPlan:
    label = bucket.choice.label if bucket.choice.codec else None
    return BucketPlan(bucket.index, [entry.index for entry in bucket.entries], bucket.flat.nbytes, label)
