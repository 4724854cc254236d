"""The times of a synchronization for a trace: when each bucket was full, left and came back; on detailed steps only."""

from __future__ import annotations

from gradsync.agreement.header import Headers
from gradsync.engine.bucket import Bucket
from gradsync.engine.listeners import Brought, Listeners
from gradsync.exchange.sender import Sender
from gradsync.trace.lines import BucketLayout, BucketPlan
from gradsync.trace.timers import Moment
from gradsync.trace.tracer import BucketMoments, Tracer
from gradsync.transport.pending import Pending


class SyncTimeline:
    """Listens to the synchronizations of one engine."""

    def __init__(self, tracer: Tracer, listeners: Listeners, sender: Sender) -> None:
        # Of the last synchronization
        self.trips: list[BucketMoments] = []
        self.header_at: tuple[Moment, Moment] | None = None
        self.sent_nbytes = 0  # put on a network
        self.raw_nbytes = 0  # before compression
        self.layout: BucketLayout | None = None  # in which it went, since when
        self._tracer = tracer
        self._listeners = listeners
        self._sender = sender
        self._each_gradient = False  # whether it hears of each
        self._ready: dict[int, Moment | None] = {}  # when a bucket's last gradient was there
        self._packed: Moment | None = None
        self._trips: list[BucketMoments] = []  # of the one under way
        self._num_left = self._num_waited = 0
        self._detailed = False
        self._layout_hash: int | None = None  # of the layout
        listeners.add(
            backward_begins=self._backward_begins,
            filled=self._filled,
            packed=self._was_packed,
            left=self._left,
            header_left=self._header_left,
            header_came=self._header_came,
            bucket_waits=self._bucket_waits,
            bucket_came=self._bucket_came,
            came=self._came,
        )

    def _backward_begins(self) -> None:
        if self._tracer.each_gradient != self._each_gradient:
            self._each_gradient = self._tracer.each_gradient
            change = self._listeners.add if self._each_gradient else self._listeners.remove
            change(each_arrival=self._tracer.arrived)

    def _filled(self, bucket: Bucket) -> None:
        self._ready[bucket.index] = self._tracer.detail()

    def _was_packed(self, bucket: Bucket) -> None:
        self._packed = self._tracer.detail()

    def _left(self, bucket: Bucket, pending: Pending) -> None:
        self._tracer.left(bucket.index)
        self._num_left += 1
        begun, ready = self._packed, self._ready.pop(bucket.index, None)
        if begun is None and bucket.choice.codec is None:
            return  # nothing of it will be told
        ready = begun if ready is None else ready
        self._trips.append(BucketMoments(bucket.index, pending.nbytes, ready, begun, spans=bucket.flat_bucket.spans))

    def _header_left(self) -> None:
        now = self._tracer.detail()
        self.header_at = None if now is None else (now, now)

    def _header_came(self, headers: Headers) -> None:
        if self.header_at is not None:
            self.header_at = (self.header_at[0], self._tracer.timer.now())

    def _bucket_waits(self, pending: Pending) -> None:
        self._detailed = self._tracer.detailed and len(self._trips) == self._num_left
        if self._detailed:
            self._trips[self._num_waited].wait_begins(self._tracer.detail())
        if not pending.succeeded:
            self._tracer.waiting(pending.bucket)

    def _bucket_came(self, pending: Pending) -> None:
        if self._detailed:
            now = self._tracer.detail()
            # On a stream the host is done long before: what comes of it is there when the stream has passed the wait.
            done = pending.finished_at if pending.on_host else 0.0
            self._trips[self._num_waited].wait_ends(now, done or now)
        self._num_waited += 1

    def _came(self, brought: Brought) -> None:
        """Note now what went: for the next synchronization the buckets may be others."""
        self.trips, self._trips = self._trips, []
        self._num_left = self._num_waited = 0
        flat_buckets = [bucket.flat_bucket for bucket in brought.buckets]
        sent = [self._sender.sent_nbytes(flat_bucket, brought.step) for flat_bucket in flat_buckets]
        self.sent_nbytes = round(sum(sent))
        if brought.layout_hash != self._layout_hash:
            self._layout_hash = brought.layout_hash
            self.raw_nbytes = sum(flat_bucket.raw_nbytes for flat_bucket in flat_buckets)
            self.layout = BucketLayout(brought.step, [_plan(bucket) for bucket in brought.buckets])


def _plan(bucket: Bucket) -> BucketPlan:
    label = bucket.choice.label if bucket.choice.codec else None
    return BucketPlan(bucket.index, [entry.index for entry in bucket.entries], bucket.flat.nbytes, label)
