"""One synchronization, from the first gradient to `.grad`, in its phases.

    begin      backward begins                       begin
    arrive     a gradient is there                   arrived
    launch     a bucket is full, and leaves          _launch        during backward; the rest at its end
    header     what every rank says of its step      synchronize    the phases from here on are that one function
    wait       until the buckets are back            _wait
    judge      whether the step counts               _judge
    deliver    the averages into `.grad`             _deliver, or _drop

    backward      │ g g g │ g g g │ g g g │ end
    lane          │       │ bucket 0 ─────│ bucket 1 ───── │ bucket 2 ── │
    header        │                       │ ──header──     │             │
    .grad                                                                 └ average, on every rank

The first synchronization is different: everything leaves at its end, after the header, in reverse order of
registration; from it rank 0 learns in which order gradients really arrive, and all ranks lay their buckets
out anew in that order, unless they lie so already.

What a bucket carries: `weighting`. Which there are, in which order: `bucket_order`. Who else hears: `listeners`.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator

from gradsync.agreement.attach_check import check_order
from gradsync.agreement.calls import check_same_call
from gradsync.agreement.header import CALL, NO_DIGEST, ORDER, Head, HeaderExchange, Headers, Mark
from gradsync.agreement.outcome import HealthLog, Outcome, spoiled, step_outcome
from gradsync.agreement.same_step import check_headers
from gradsync.engine.bucket import Bucket, GradEntry
from gradsync.engine.bucket_order import BucketOrder
from gradsync.engine.listeners import Act, Brought, Listeners
from gradsync.engine.replicas import Buffers
from gradsync.engine.unbucketed import average_unbucketed
from gradsync.engine.weighting import MicroBatches, Weighting
from gradsync.errors import BackwardAborted, Disagreement, NonFinite
from gradsync.exchange.sender import GradientExchange
from gradsync.plan.guard import Guard
from gradsync.plan.sync_plan import Plan
from gradsync.transport.heartbeat import Phase
from gradsync.transport.pending import Pending
from gradsync.transport.shared_memory import LabelsDiffer


class Synchronization:
    """Runs one synchronization after the other."""

    def __init__(
        self,
        entries: list[GradEntry],
        exchange: GradientExchange,
        plan: Plan,
        guard: Guard,
        buffers: Buffers,
        health_log: HealthLog,
        k: int,
        idle: bool = False,
    ) -> None:
        """`k` micro-batches make a mean. `idle`: a pace averages something else, and gradients only arrive."""
        self.entries = entries
        self.lane, self.exact, self.sender = exchange
        self._alive = self.lane.groups.alive()
        self.health_log = health_log
        self.bucket_order = BucketOrder(entries, plan.bucket_bytes, self.lane, self.exact.allocate, self.sender, idle)
        self.weighting = Weighting(self.lane.groups.size, k, plan.combine)
        self.micro = MicroBatches(entries, self.weighting)
        self.listeners = Listeners()
        self.buffers = buffers
        self._session = self.lane.session
        self._plan = plan
        self._guard = guard
        self._names = [entry.name for entry in entries]
        self.number = 0  # of the backward, to tell one from the next
        self.seen = [-1] * len(entries)  # by entry: the backward in which its hook last fired
        self._streaming = False  # whether buckets leave during this backward
        self._launching = threading.Lock()  # autograd has a thread per device
        self._nothing_used = bytes(len(entries))  # the marks of a step that has not begun
        # The synchronization under way
        self.marks = bytearray(len(entries))
        self.note_trainable()
        self.dropped = False  # whether the last synchronization came to nothing
        self.delivered = False  # whether it brought any rank's gradient
        self.brought = b""  # the marks of whose gradients it brought
        self._begin_step()

    def _begin_step(self) -> None:
        self.marks[:] = self._nothing_used
        self.micro.begin()
        self.backwards = 0  # since the last synchronization
        self.scale = 1.0  # by which gradients are multiplied before they travel
        self._missing = [len(bucket.entries) for bucket in self.bucket_order.buckets]  # gradients, by bucket
        self._next = 0  # the bucket whose turn it is
        self._arrivals: list[int] = []
        self._in_flight: list[Pending] = []
        self._launched: list[Bucket] = []
        self._out_of_order = False  # a bucket was not the one whose turn it was: nothing more leaves
        self._blocked = False  # a full bucket waits for an earlier one
        self._held_up_by: str | None = None

    # Begin

    def note_trainable(self) -> None:
        """Read which parameters require a gradient now."""
        self._nothing_used = bytes(Mark.TRAINABLE if e.param.requires_grad else 0 for e in self.entries)
        for index, trainable in enumerate(self._nothing_used):
            self.marks[index] = (self.marks[index] & ~Mark.TRAINABLE) | trainable

    def begin(self, synchronize: bool) -> None:
        """A backward begins; `synchronize` if it is the one after which gradients travel."""
        if not self.backwards:
            self.micro.set_aside()
        self.number += 1
        streams = synchronize and self.bucket_order.learned and self._plan.overlap == "backward"
        self._streaming = self.micro.weigh() and streams
        self.scale = self.weighting.scale()
        self._session.at(Phase.BACKWARD)

    def backward_counts(self, count: int) -> None:
        """Count so many backwards as ended, or something that counts as them."""
        self.backwards += count
        self.micro.merge()

    def missed(self, count: int) -> None:
        """Count so many backwards: this rank's loss touched no parameter."""
        if not self.backwards:
            self.micro.set_aside()
        self.backward_counts(count)

    def nothing_came(self, backwards: int) -> None:
        """A backward brought no gradient; the window has so many."""
        self.micro.nothing_came(self.backwards + backwards)
        if not self.backwards:  # else it was set aside by the first one of this step, and stays there until the sum
            self.micro.put_back()

    def forget(self) -> None:
        """Forget what arrived, as it was none of ours, and be ready for the next step."""
        self.micro.put_back()
        self._begin_step()

    # Arrive

    def arrived(self, entry: GradEntry) -> None:
        """The gradient of one parameter has been accumulated into `.grad`. The hottest line of all."""
        index = entry.index
        if self.seen[index] == self.number:
            self._arrived_again(entry)
            return
        self.seen[index] = self.number
        self.marks[index] |= Mark.USED
        bucket = entry.bucket
        if bucket is None:
            return
        for hear in self.listeners.each_arrival:
            hear(index)
        if bucket.on_gpu:
            bucket.note_stream()
        if not self._streaming:
            self._arrivals.append(index)
            for hear in self.listeners.arrived:
                hear(index)
            return
        if entry.large:
            entry.take(self.scale)
        self._missing[bucket.index] -= 1
        if not self._missing[bucket.index]:
            for tell in self.listeners.filled:
                tell(bucket)
            self._advance(entry)

    def _arrived_again(self, entry: GradEntry) -> None:
        """A gradient came twice in one backward: reentrant checkpointing of segments that share a weight."""
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
            entry.take(self.scale)

    # Launch

    def _advance(self, entry: GradEntry) -> None:
        """Launch every bucket that is full and whose turn it is."""
        with self._launching:
            buckets, missing = self.bucket_order.buckets, self._missing
            if self._next < len(buckets) and missing[self._next]:
                self._blocked = True
                return
            if self._blocked:
                self._held_up_by = entry.name
                self._blocked = False
            while self._next < len(buckets) and not missing[self._next] and not buckets[self._next].held:
                self._launch(buckets[self._next])

    def _launch_rest(self) -> None:
        for bucket in self.bucket_order.buckets[self._next :]:
            self._launch(bucket)
        if self.sender.goes_in_rounds:
            self.sender.flush()

    def _launch(self, bucket: Bucket) -> None:
        self._launched.append(bucket)
        self._out_of_order |= bucket.fingerprint != self.bucket_order.fingerprints[self._next]
        if self._out_of_order:  # the header will tell the others
            self._next += 1
            return
        bucket.complete(self.marks, self.scale, whole=not self._missing[bucket.index])
        for hear in self.listeners.packed:
            hear(bucket)
        pending = self.sender.launch(bucket.flat_bucket)
        self._session.at(Phase.BACKWARD, bucket.index)
        self._in_flight.append(pending)
        self._next += 1
        for tell in self.listeners.left:
            tell(bucket, pending)

    # After the last gradient

    def synchronize(self, micro_batches: int, flags: int, source: int, num_steps: int) -> Iterator[None]:
        """Do what follows the end of backward; stops once, and does not wait before: see [Side by side].

        `source` is the rank whose buffers count; `num_steps` is how often optimizers stepped, as `steps` says it.
        """
        for tell in self.listeners.settling:
            tell()
        self.micro.merge()
        self.scale = self.weighting.scale()
        if self.bucket_order.learned:
            self._launch_rest()
        self._session.at(Phase.SYNCHRONIZING)
        if self.buffers.any:
            self.buffers.launch(self.lane, source)
        header = HeaderExchange(self.lane, self._head(micro_batches, flags, num_steps), self.marks)
        for tell in self.listeners.header_left:
            tell()

        yield  # other models of this backward launch theirs

        headers = self._receive(header)
        acts = [hear(headers) for hear in self.listeners.header_came]
        if not self.bucket_order.learned:  # only now are the weights known
            self.weighting.follow(headers)
            self.scale = self.weighting.scale()
            self._launch_rest()
            self._session.at(Phase.SYNCHRONIZING)

        self._wait(headers)
        outcome, why = self._judge(headers, acts)
        self.dropped = outcome is not Outcome.COUNTS
        if self.dropped:
            self._drop()
        else:
            self._deliver(headers)
        if self.buffers.any:
            self.buffers.finish(self.lane)
        self._end(headers)
        place = self.lane.place() if outcome is Outcome.RAISES else ""
        self._session.next_step()
        if outcome is Outcome.RAISES:
            raise NonFinite(f"{place} {why}; no rank has applied this step")

    # Header

    def _head(self, micro_batches: int, flags: int, num_steps: int) -> Head:
        learned, layout_hash = self.bucket_order.learned, self.bucket_order.layout_hash
        for entry in self.bucket_order.unbucketed if learned else self.entries:
            if entry.param.grad is not None and entry.param.grad.is_sparse:
                self.marks[entry.index] |= Mark.SPARSE
        weight, flags = self.weighting.announced(flags, micro_batches)
        in_order = learned and not self._out_of_order
        order = layout_hash if in_order else zlib.crc32(b"".join(b.fingerprint for b in self._leaving()))
        head = Head(
            self._session.step, layout_hash, weight, self.backwards, -1, micro_batches, flags, NO_DIGEST, order=order,
            num_steps=num_steps,
        )  # fmt: skip
        for write in self.listeners.announce:
            head = write(head)
        return head

    def _receive(self, header: HeaderExchange) -> Headers:
        for tell in self.listeners.header_waits:
            tell()
        headers = header.receive()
        # Before anything else is waited for: a rank in another call, or astray, will never send a bucket.
        if headers.differ_in(CALL | ORDER):
            check_same_call(headers, self.lane.groups.ranks)
            check_headers(headers, self._names, self.lane.groups.ranks)  # another step or layout says more
            check_order(self.lane, headers, [bucket.describe() for bucket in self._leaving()], self.health_log)
        return headers

    def _leaving(self) -> list[Bucket]:
        """The buckets in the order in which this rank launched them, or will after its first header."""
        return self._launched or self.bucket_order.buckets

    # Wait, judge, deliver

    def _wait(self, headers: Headers) -> None:
        try:
            for pending in self._in_flight:
                for hear in self.listeners.bucket_waits:
                    hear(pending)
                self.lane.wait(pending)
                for hear in self.listeners.bucket_came:
                    hear(pending)
        except LabelsDiffer as error:
            # The headers know better why: another step, another layout.
            check_headers(headers, self._names, self.lane.groups.ranks)
            self.lane.fail()
            raise Disagreement(
                f"{self.lane.place()} the ranks of this host came to different sums: {'; '.join(error.labels)}"
            ) from None
        order = self.bucket_order
        brought = Brought(self._session.step, self._in_flight, order.buckets, order.layout_hash, self._held_up_by)
        for tell in self.listeners.came:
            tell(brought)

    def _judge(self, headers: Headers, acts: list[Act | None]) -> tuple[Outcome, str]:
        """Return whether the step counts, and what an exception has to say: alike on all ranks."""
        outcome, why = step_outcome(self.lane, self._guard, headers, self._names, self.health_log)
        for judge in self.listeners.judge:
            found = judge(headers) if outcome is Outcome.COUNTS else None
            if found is not None:
                outcome, why = spoiled(self.lane, self._guard, found, self.health_log)
        if outcome is Outcome.COUNTS:
            self.health_log.counted()
        for act in acts:
            if act is not None:
                act()
        return outcome, why

    def _deliver(self, headers: Headers) -> None:
        for hear in self.listeners.averaged:
            hear(headers)
        factor, used = self.weighting.factor(headers), headers.used
        everything = None if used.count(1) == len(used) else used
        for bucket in self.bucket_order.buckets:
            bucket.hand_out(everything, factor, self._alive)
        if unbucketed := [entry for entry in self.bucket_order.unbucketed if used[entry.index]]:
            average_unbucketed(self.lane, self.exact, unbucketed, headers, self.marks, self.scale, factor)
        self.micro.put_back()

    def _drop(self) -> None:
        """The step came to nothing: no rank keeps a gradient of it."""
        for entry in self.entries:
            entry.drop()
        for bucket in self.bucket_order.buckets:
            bucket.reset()
        self.micro.drop_aside()

    def _end(self, headers: Headers) -> None:
        """Keep what this step taught for the next one."""
        self.brought = b"" if self.dropped else headers.used
        self.delivered = any(self.brought)
        unit = self.weighting.unit
        self.weighting.follow(headers)
        if unit != self.weighting.unit:
            self.sender.rescale(unit / self.weighting.unit)  # what is kept is in the unit of what comes next
        if not (self.bucket_order.learned and headers.marks == self.bucket_order.last_marks):
            self.bucket_order.learn(headers, self._arrivals)
        self._begin_step()

    # Where another one was

    def continue_from(self, other: Synchronization) -> None:
        """Take the place of one that had another plan, at its border; every rank calls this at once."""
        self.sender.replace(other.sender.kept())
        self.bucket_order.arrange(other.bucket_order.arrangement())
        self._begin_step()
        self.weighting.continue_from(other.weighting)
        self.dropped, self.delivered = other.dropped, other.delivered
        self._session.continue_at(other.lane.step)

    def continue_window(self, backwards: int, names: set[str]) -> None:
        """A window was open: so many backwards, which brought the gradients of these parameters."""
        self.forget()
        self.backwards = backwards
        for entry in self.entries:
            if entry.name in names:
                self.marks[entry.index] |= Mark.USED
