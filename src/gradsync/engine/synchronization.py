"""One synchronization: gradients arrive, buckets leave in the agreed order, averages come back.

    backward      │ g g g │ g g g │ g g g │ end
    lane          │       │ bucket 0 ─────│ bucket 1 ───── │ bucket 2 ── │
    header        │                       │ ──header──     │             │
    .grad                                                                 └ average, on every rank

The first synchronization is different: everything leaves at its end, after the header, in reverse order of
registration; from it rank 0 learns in which order gradients really arrive, and all ranks lay their buckets
out anew in that order, unless they lie so already.

What a bucket carries, and what its sum is multiplied by, is in `weighting`; which buckets there are and in
which order they leave is in `bucket_order`.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Container

import torch

from gradsync.agreement.attach_check import check_order
from gradsync.agreement.calls import check_same_call, launch_header
from gradsync.agreement.header import Flag, Head, Headers, Mark, check_headers
from gradsync.agreement.outcome import HealthLog, Outcome, spoiled, step_verdict
from gradsync.drift.monitor import DriftMonitor
from gradsync.engine.bucket import Bucket, Entry
from gradsync.engine.bucket_order import BucketOrder
from gradsync.engine.listeners import Listener, NoListener
from gradsync.engine.nonfinite import (
    NO_DIGEST,
    NOWHERE,
    digest_of,
    is_finite,
    made_by_compression,
    spot,
    warn_if_same_data,
)
from gradsync.engine.replicas import Buffers
from gradsync.engine.sync_timeline import Logbook
from gradsync.engine.unbucketed import average_apart
from gradsync.engine.weighting import MicroBatches, Weighting
from gradsync.errors import BackwardAborted, Disagreement, NonFinite
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.sender import Sender
from gradsync.plan.guard import Guard
from gradsync.plan.plan import Plan
from gradsync.trace import Recorder
from gradsync.trace.timers import span
from gradsync.transport.heartbeat import Phase
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Pending
from gradsync.transport.shared_memory import Cards


class Synchronization:
    """Runs one synchronization after the other."""

    def __init__(
        self,
        entries: list[Entry],
        lane: Lane,
        exact: ExactSum,
        sender: Sender,
        plan: Plan,
        guard: Guard,
        buffers: Buffers,
        recorder: Recorder,
        health_log: HealthLog,
        drift_monitor: DriftMonitor,
        k: int,
        idle: bool = False,
    ) -> None:
        """`idle`: a pace averages something else, and gradients only arrive."""
        self.entries = entries
        self.lane = lane
        self.recorder = recorder
        self.health_log = health_log
        self.drift_monitor = drift_monitor
        self.sender = sender
        self.bucket_order = BucketOrder(entries, plan.bucket_bytes, lane, exact.allocate, sender, idle)
        self.weighting = Weighting(lane.groups.size, k, plan.combine)
        self.micro = MicroBatches(entries, self.weighting)
        self.exact = exact
        self.listener: Listener = NoListener()
        self.logbook = Logbook()
        self._plan = plan
        self._guard = guard
        self.buffers = buffers
        self._names = [entry.name for entry in entries]
        self.number = 0  # of the backward, to tell one from the next
        self._streaming = False  # whether buckets leave during this backward
        self._turn = threading.Lock()  # autograd has a thread per device
        self._nothing_used = bytes(len(entries))  # the marks of a step that has not begun
        # The synchronization under way
        self.marks = bytearray(len(entries))
        self.note_trainable()
        self._standing: list[tuple[Entry, torch.Tensor]] = []
        self.dropped = False  # whether the last synchronization came to nothing
        self.delivered = False  # whether it brought any rank's gradient
        self.brought = b""  # the marks of whose gradients it brought
        self._begin_step()

    def _begin_step(self) -> None:
        self.marks[:] = self._nothing_used
        self.micro.begin()
        self.backwards = 0  # since the last synchronization
        self._scale = 1.0
        self._next = 0  # the bucket whose turn it is
        self._arrivals: list[int] = []
        self._in_flight: list[Pending] = []
        self._header: tuple[Pending, torch.Tensor] | None = None
        self._spot = NOWHERE  # the first parameter with NaN or Inf
        self._launched: list[Bucket] = []
        self._astray = False  # a bucket was not the one whose turn it was: nothing more leaves
        self._blocked = False  # a full bucket waits for an earlier one
        self._held_up_by: str | None = None
        self.logbook.begin()

    def continue_from(self, old: Synchronization) -> None:
        """Go on where the engine before this one stood, between two steps."""
        self.weighting.continue_from(old.weighting)
        self.dropped, self.delivered = old.dropped, old.delivered
        self.recorder.continue_at(old.recorder.count)

    def resume_window(self, backwards: int, names: Container[str]) -> None:
        """A state was loaded: go on in a window of so many backwards, which brought gradients of these parameters."""
        self.forget()
        self.backwards = backwards
        for entry in self.entries:
            if entry.name in names:
                self.marks[entry.index] |= Mark.USED

    # Before and during backward

    def note_trainable(self) -> None:
        """Read which parameters require a gradient now."""
        self._nothing_used = bytes(Mark.TRAINABLE if e.param.requires_grad else 0 for e in self.entries)
        for index, trainable in enumerate(self._nothing_used):
            self.marks[index] = (self.marks[index] & ~Mark.TRAINABLE) | trainable

    def begin(self, synchronize: bool) -> None:
        """A backward begins; `synchronize` if it is the one after which gradients travel."""
        self.set_aside()
        self.number += 1
        streams = synchronize and self.bucket_order.learned and self._plan.overlap == "backward"
        self._streaming = self.micro.weigh() and streams
        self._scale = self.weighting.scale()
        self.lane.at(Phase.BACKWARD)

    def set_aside(self) -> None:
        """A sum that was synchronized before must not be added up over the ranks again."""
        if self._plan.combine == "sum" and not self.backwards and not self._standing:
            for entry in self.entries:
                if entry.param.grad is not None:
                    self._standing.append((entry, entry.param.grad.detach().clone()))
                    entry.param.grad = None

    def nothing_came(self, backwards: int) -> None:
        """A backward brought no gradient; the window has so many."""
        self.micro.nothing_came(self.backwards + backwards)
        if not self.backwards:  # else it was set aside by the first one of this step, and stays there until the sum
            self.put_back()

    def put_back(self) -> None:
        """Add what was set aside to what is there."""
        for entry, grad in self._standing:
            entry.param.grad = grad if entry.param.grad is None else entry.param.grad + grad
        self._standing = []

    def arrived(self, entry: Entry) -> None:
        """The gradient of one parameter has been accumulated into `.grad`. The hottest line of all."""
        if entry.seen == self.number:
            self._arrived_again(entry)
            return
        entry.seen = self.number
        self.marks[entry.index] |= Mark.USED
        bucket = entry.bucket
        if bucket is None:
            return
        tracer = self.logbook.tracer
        if tracer is not None and tracer.each_gradient:
            tracer.arrived(entry.index)
        if bucket.on_gpu:
            bucket.note_stream()
        if not self._streaming:
            self._arrivals.append(entry.index)
            self.listener.arrived(entry.index)
            return
        if entry.large:
            entry.take(self._scale)
        bucket.missing -= 1
        if not bucket.missing:
            self.logbook.filled(bucket)
            self._advance(entry)

    def _arrived_again(self, entry: Entry) -> None:
        """A second time in one backward: reentrant checkpointing of segments that share a weight."""
        self.marks[entry.index] |= Mark.REPEATED
        bucket = entry.bucket
        if bucket is None or not self._streaming:
            return
        if bucket.index < self._next:
            raise BackwardAborted(
                f"{self.lane.place(bucket.index)} a gradient of {entry.name} arrived after its bucket had left: its "
                "hook fired twice in one backward, which happens when a weight is shared between segments under "
                "reentrant checkpointing. Skip this batch (the next forward drops it on every rank, and from "
                "then on the bucket waits), or use checkpoint(..., use_reentrant=False)"
            )
        if entry.large:
            entry.take(self._scale)

    def _advance(self, entry: Entry) -> None:
        """Launch every bucket that is full and whose turn it is."""
        with self._turn:
            buckets = self.bucket_order.buckets
            if self._next < len(buckets) and buckets[self._next].missing:
                self._blocked = True
                return
            if self._blocked:
                self._held_up_by = entry.name
                self._blocked = False
            while self._next < len(buckets) and not buckets[self._next].missing and not buckets[self._next].held:
                self._launch(buckets[self._next])

    def forget(self) -> None:
        """What arrived was none of ours: be ready for the next step."""
        self.put_back()
        self._begin_step()

    # The end of backward: see [Side by side] in shared_backward.py

    def launch_rest(self, micro_batches: int, flags: Flag, source: int, num_steps: int) -> None:
        """Phase one, which never waits: what has not left leaves, and the header.

        `source` is the rank whose buffers count; `num_steps` is how often optimizers stepped, as `turns` says it.
        """
        self.micro.merge()
        self.lane.at(Phase.SYNCHRONIZING)
        self.recorder.start_waiting(self._on_device())
        self._scale = self.weighting.scale()
        if self.bucket_order.learned:
            self._launch_buckets()
        elif self._guard.nonfinite != "allow" and self._scale:
            self._spot = spot((e, e.param.grad) for e in self.entries if e.param.grad is not None)
        self.buffers.launch(self.lane, source)
        self._launch_header(micro_batches, flags, num_steps)

    def settle_first(self) -> None:
        """Phase two of the first synchronization: with the weights known, all buckets leave."""
        if not self.bucket_order.learned:
            self.weighting.follow(self._wait_header())
            self._scale = self.weighting.scale()
            self._launch_buckets()

    def finish(self) -> None:
        """Last phase: wait for everything, hand the averages out, or drop the step."""
        self.logbook.closed = False
        self.drift_monitor.take(self.lane.step)
        headers = self._wait_header()
        self._wait_buckets(headers)
        self._close_record()
        verdict, why = step_verdict(self.lane, self._guard, headers, self._names, self.health_log)
        strict = verdict is Outcome.COUNTS and self._guard.nonfinite != "allow"
        overflow = made_by_compression(self.bucket_order.buckets) if strict else None
        if overflow is not None:
            verdict, why = spoiled(self.lane, self._guard, overflow, self.health_log)
        self.drift_monitor.hear(headers, self.lane)()
        self.dropped = verdict is not Outcome.COUNTS
        if self.dropped:
            self._drop()
        else:
            self.health_log.counted()
            if not self.bucket_order.learned and self.lane.groups.rank == 0:
                warn_if_same_data(headers)
            self._hand_out(headers)
        self.brought = b"" if self.dropped else headers.any(Mark.USED)
        self.delivered = any(self.brought)
        self.buffers.finish(self.lane)
        unit = self.weighting.unit
        self.weighting.follow(headers)
        self.sender.rescale(unit / self.weighting.unit)  # what is kept is in the unit of what comes next
        self.bucket_order.learn(headers, self._arrivals)
        self._begin_step()
        step = self.lane.place()
        self.lane.session.next_step()
        self.logbook.closed = True
        self.lane.at(Phase.COMPUTING)
        if verdict is Outcome.RAISES:
            raise NonFinite(f"{step} {why}; no rank has applied this step")

    def _launch_buckets(self) -> None:
        for bucket in self.bucket_order.buckets[self._next :]:
            self._launch(bucket)
        self.sender.flush()

    def _launch(self, bucket: Bucket) -> None:
        self._launched.append(bucket)
        self._astray |= bucket.mark != self.bucket_order.bucket_marks[self._next]
        if self._astray:  # the header will tell the others
            self._next += 1
            return
        bucket.complete(self.marks, self._scale)
        if self._guard.nonfinite != "allow" and self._spot is NOWHERE and not is_finite(bucket.flat):
            self._spot = spot((entry, entry.view) for entry in bucket.entries)
        self.lane.at(Phase.BACKWARD, bucket.index)
        begun = self.logbook.moment()
        with span("launch", bucket.index):
            self._in_flight.append(self.sender.launch(bucket.flat_bucket))
        self.logbook.left(bucket, self._in_flight[-1], begun)
        self._next += 1

    def _launch_header(self, micro_batches: int, flags: Flag, num_steps: int) -> None:
        for entry in self.entries if not self.bucket_order.learned else self.bucket_order.apart:
            if entry.param.grad is not None and entry.param.grad.is_sparse:
                self.marks[entry.index] |= Mark.SPARSE
        if self._guard.nonfinite != "allow" and self._spot is NOWHERE and self._scale:
            self._spot = spot((e, e.param.grad) for e in self.bucket_order.apart if e.param.grad is not None)
        weight, flags = self.weighting.announced(flags, micro_batches)
        digest = NO_DIGEST if self.bucket_order.learned else digest_of(self.entries)
        schedule = self.bucket_order.schedule
        head = Head(
            self.lane.step, schedule, weight, self.backwards, self._spot.parameter, micro_batches, flags, digest
        )
        replica_digest, loss_scale = self.drift_monitor.announce()
        if flags & Flag.SHADOW:
            loss_scale = 0.0  # its scaler stands still, and follows when join() ends
        head = head._replace(
            num_nonfinite=self._spot.num_elements,
            order=self._order(),
            replica_digest=replica_digest,
            loss_scale=loss_scale,
            num_steps=num_steps,
        )
        self._header = launch_header(self.lane, head, self.marks)
        self.logbook.header_left()

    def _wait_header(self) -> Headers:
        assert self._header is not None
        pending, rows = self._header
        self.lane.at(Phase.SYNCHRONIZING)
        with span("wait for the header"):
            self.lane.wait(pending)
        self.logbook.header_came()
        headers = Headers(rows)
        # Before anything else is waited for: a rank in another call, or astray, will never send a bucket.
        check_same_call(headers, self.lane.groups.ranks)
        self._check_order(headers)
        return headers

    def _wait_buckets(self, headers: Headers) -> None:
        try:
            self.logbook.wait(self.lane, self._in_flight)
        except Cards as error:
            # The headers know better why: another step, another layout.
            check_headers(headers, self._names, self.lane.groups.ranks)
            self.lane.fail()
            raise Disagreement(
                f"{self.lane.place()} the ranks of this host came to different sums: {'; '.join(error.cards)}"
            ) from None

    # What comes back

    def _hand_out(self, headers: Headers) -> None:
        factor = self.weighting.factor(headers)
        used = headers.any(Mark.USED)
        everything = None if used.count(1) == len(used) else used
        for bucket in self.bucket_order.buckets:
            bucket.hand_out(everything, factor)
        apart = [entry for entry in self.bucket_order.apart if used[entry.index]]
        if apart:
            average_apart(self.lane, self.exact, apart, headers, self.marks, self._scale, factor)
        self.put_back()

    def _drop(self) -> None:
        """The step came to nothing: no rank keeps a gradient of it."""
        for entry in self.entries:
            entry.kept = None
            if entry.param.requires_grad:
                entry.param.grad = None
        for bucket in self.bucket_order.buckets:
            bucket.reset()
        self._standing = []

    # Small facts

    def _on_device(self) -> bool:
        """Whether the host only queues the waiting, and a device does it."""
        return any(not channel.on_host for channel in self.lane.groups.data.values())

    def _close_record(self) -> None:
        spans = [(t.launched_at, t.finished_at) for t in self._in_flight if t.finished_at]
        nbytes = sum(pending.nbytes for pending in self._in_flight)
        self.logbook.close(self.bucket_order, self.sender, self.lane.step)
        self.recorder.finish_step(self.lane.step, spans, nbytes, len(self._in_flight), self._held_up_by)

    def _leaving(self) -> list[Bucket]:
        """The buckets in the order in which this rank launched them, or will after its first header."""
        return self._launched or self.bucket_order.buckets

    def _order(self) -> int:
        return zlib.crc32(b"".join(bucket.mark for bucket in self._leaving()))

    def _check_order(self, headers: Headers) -> None:
        if all(head.order == headers.heads[0].order for head in headers.heads):
            return
        check_headers(headers, self._names, self.lane.groups.ranks)  # another step or layout says more
        try:
            check_order(self.lane, headers, [bucket.describe() for bucket in self._leaving()])
        except Disagreement as error:
            self.health_log.tell(self.lane.step, "order", str(error))
            raise
