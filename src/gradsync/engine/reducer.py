"""One synchronization: gradients arrive, buckets leave in the agreed order, averages come back.

    backward      │ g g g │ g g g │ g g g │ end
    lane          │       │ bucket 0 ─────│ bucket 1 ───── │ bucket 2 ── │
    header        │                       │ ──header──     │             │
    .grad                                                                 └ average, on every rank

The first synchronization is different: everything leaves at its end, after the header, in reverse order of
registration; from it rank 0 learns in which order gradients really arrive, and all ranks lay their buckets
out anew in that order.

A bucket carries w·g/n (w the rank's weight, n the ranks); the division by the mean weight happens when the
header is in. With equal weights there is none, and the bits are those of DistributedDataParallel.
"""

from __future__ import annotations

import hashlib
import math
import struct
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradsync.engine.bucket import Bucket, Entry, Layout
from gradsync.engine.replicas import Buffers
from gradsync.errors import BackwardAborted, NonFinite, listed
from gradsync.exchange.exact import launch_sum
from gradsync.exchange.sparse import average_sparse
from gradsync.guard.calls import check_same_call, launch_header
from gradsync.guard.header import Flag, Head, Headers, Mark, check_headers
from gradsync.plan import Plan
from gradsync.policy import Guard
from gradsync.trace import Recorder
from gradsync.transport.lane import Lane, Ticket
from gradsync.transport.page import Phase

_NO_DIGEST = bytes(8)


class Reducer:
    """Holds the buckets and runs one synchronization after the other."""

    def __init__(self, entries: list[Entry], lane: Lane, plan: Plan, guard: Guard, buffers: Buffers, k: int) -> None:
        self.entries = entries
        self.lane = lane
        self.recorder = Recorder()
        self._plan = plan
        self._guard = guard
        self._buffers = buffers
        self._k = k
        self._names = [entry.name for entry in entries]
        # Agreed, equal on all ranks
        self.order = list(reversed(range(len(entries))))
        self.learned = False  # whether `order` is the order of arrival
        self._held: set[int] = set()
        self._unit = 1.0  # power of two near the mean weight, so that half types do not overflow
        # The synchronization under way
        self.marks = bytearray(len(entries))
        self.weight: float | None = None
        self.backwards = 0
        self._backward = 0
        self._streaming = False
        self._scale = 1.0
        self._next = 0
        self._arrivals: list[int] = []
        self._tickets: list[Ticket] = []
        self._header: tuple[Ticket, torch.Tensor] | None = None
        self._nonfinite = -1
        self._blocked = False
        self._held_up_by: str | None = None
        self._source = 0
        self._nothing_used = bytes(len(entries))  # the marks of a step that has not begun
        self._last_marks = b""  # what all ranks said in the last step, if they said the same
        self.note_trainable()
        self.lay_out()

    # Before and during backward

    def note_trainable(self) -> None:
        """Read which parameters require a gradient now."""
        self._nothing_used = bytes(Mark.TRAINABLE if e.param.requires_grad else 0 for e in self.entries)
        for index, trainable in enumerate(self._nothing_used):
            self.marks[index] = (self.marks[index] & ~Mark.TRAINABLE) | trainable

    def begin(self, synchronize: bool) -> None:
        """A backward begins; `synchronize` if it is the one after which gradients travel."""
        self._backward += 1
        self._streaming = synchronize and self.learned and self._plan.overlap == "backward"
        self._scale = self._local_scale()
        self.lane.at(Phase.BACKWARD)

    def arrived(self, entry: Entry) -> None:
        """The gradient of one parameter has been accumulated into `.grad`. The hottest line of all."""
        if entry.seen == self._backward:
            self._arrived_again(entry)
            return
        entry.seen = self._backward
        self.marks[entry.index] |= Mark.USED
        bucket = entry.bucket
        if bucket is None:
            return
        if bucket.on_gpu:
            bucket.note_stream()
        if not self._streaming:
            self._arrivals.append(entry.index)
            return
        if entry.large:
            entry.take(self._scale)
        bucket.missing -= 1
        if not bucket.missing:
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
        buckets = self._layout.buckets
        if self._next < len(buckets) and buckets[self._next].missing:
            self._blocked = True  # a full bucket waits for an earlier one
            return
        if self._blocked:
            self._held_up_by = entry.name
            self._blocked = False
        while self._next < len(buckets) and not buckets[self._next].missing and not buckets[self._next].held:
            self._launch(buckets[self._next])

    # The end of backward, in three phases: see [Three phases] in hooks.py

    def launch_rest(self, micro_batches: int, flags: Flag = Flag.NONE, source: int = 0) -> None:
        """Phase one, which never waits: what has not left leaves, and the header.

        `source` is the rank whose buffers count.
        """
        self.lane.at(Phase.SYNCHRONIZING)
        self.recorder.start_waiting(self._on_device())
        self._scale = self._local_scale()
        self._source = source
        if self.learned:
            self._launch_buckets()
        elif self._guard.nonfinite != "allow":
            self._find_nonfinite((e, e.param.grad) for e in self.entries if e.param.grad is not None)
        self._launch_header(micro_batches, flags)

    def settle_first(self) -> None:
        """Phase two of the first synchronization: with the weights known, all buckets leave."""
        if not self.learned:
            self._set_unit(self._wait_header())
            self._scale = self._local_scale()
            self._launch_buckets()

    def finish(self) -> bool:
        """Last phase: wait for everything, hand the averages out; False if the step was dropped."""
        headers = self._wait_header()
        for ticket in self._tickets:
            self.lane.wait(ticket)
        self._close_record()
        check = self._checked(headers)
        if check:
            self._hand_out(headers)
        else:
            self._drop()
        self._buffers.finish(self.lane)
        self._learn(headers)
        self._reset()
        return check

    def _launch_buckets(self) -> None:
        for bucket in self._layout.buckets[self._next :]:
            self._launch(bucket)
        self._buffers.launch(self.lane, self._source)

    def _launch(self, bucket: Bucket) -> None:
        bucket.complete(self.marks, self._scale)
        if self._guard.nonfinite != "allow" and self._nonfinite < 0 and not bool(bucket.flat.sum().isfinite()):
            self._find_nonfinite((entry, entry.view) for entry in bucket.entries)
        self.lane.at(Phase.BACKWARD, bucket.index)
        self._tickets.append(launch_sum(self.lane, bucket.flat, bucket.index))
        self._next += 1

    def _launch_header(self, micro_batches: int, flags: Flag) -> None:
        if self.weight is not None:
            flags |= Flag.WEIGHTED
        for entry in self.entries if not self.learned else self._apart:
            if entry.param.grad is not None and entry.param.grad.is_sparse:
                self.marks[entry.index] |= Mark.SPARSE
        weight = 0.0 if flags & (Flag.SHADOW | Flag.ABORTED) else 1.0 if self.weight is None else self.weight
        digest = _NO_DIGEST if self.learned else _digest(self.entries)
        head = Head(
            self.lane.step, self._layout.schedule, weight, self.backwards, self._nonfinite, micro_batches, flags, digest
        )
        self._header = launch_header(self.lane, head, self.marks)

    def _wait_header(self) -> Headers:
        assert self._header is not None
        ticket, rows = self._header
        self.lane.at(Phase.SYNCHRONIZING)
        self.lane.wait(ticket)
        headers = Headers(rows)
        # Before anything else is waited for: a rank in another call will never send a bucket.
        check_same_call(headers, self.lane.groups.ranks)
        return headers

    def _checked(self, headers: Headers) -> bool:
        """Whether the step counts; raises the same error everywhere if ranks disagree."""
        ranks = self.lane.groups.ranks
        aborted = headers.flagged(Flag.ABORTED)
        if aborted:
            who = listed([ranks[rank] for rank in aborted])
            warnings.warn(
                f"{self.lane.place()} backward did not finish on {who}: the batch is skipped on every rank",
                stacklevel=2,
            )
            return False
        try:
            check_headers(headers, self._names, ranks)
            if not self.learned:
                self._warn_if_same_data(headers)
            return self._all_finite(headers)
        except Exception:
            self.lane.fail()
            raise

    def _all_finite(self, headers: Headers) -> bool:
        if self._guard.nonfinite == "allow":
            return True
        for rank, head in enumerate(headers.heads):
            if head.nonfinite >= 0:
                name = self._names[head.nonfinite]
                who = f"rank {self.lane.groups.ranks[rank]} has NaN or Inf in the gradient of {name}"
                if self._guard.nonfinite == "raise":
                    raise NonFinite(f"{self.lane.place()} {who}; no rank has applied this step")
                warnings.warn(f"{self.lane.place()} {who}: the step is skipped on every rank", stacklevel=2)
                return False
        return True

    # What comes back

    def _hand_out(self, headers: Headers) -> None:
        self._set_unit(headers)
        total = headers.total_weight()
        factor = 1.0
        if self._plan.combine == "mean" and total > 0:
            factor = self.lane.groups.size * self._k * self._scale_unit / total
        used = headers.any(Mark.USED)
        everything = None if used.count(1) == len(used) else used
        for bucket in self._layout.buckets:
            if factor != 1.0:
                bucket.flat.mul_(factor)
            bucket.hand_out(everything)
        apart = [entry for entry in self._apart if used[entry.index]]
        if apart:
            self._average_apart(apart, headers, factor)

    def _average_apart(self, entries: list[Entry], headers: Headers, factor: float) -> None:
        """Gradients that have no bucket: sparse ones, and those of parameters that were just unfrozen."""

        def dense_somewhere(entry: Entry) -> bool:
            return any(m[entry.index] & Mark.USED and not m[entry.index] & Mark.SPARSE for m in headers.marks)

        sparse = [e for e in entries if e.sparse and not dense_somewhere(e)]
        dense = [e for e in entries if e not in sparse]
        if sparse:
            grads = [_sparse_grad(entry.param) for entry in sparse]
            averaged = average_sparse(self.lane, grads, [e.name for e in sparse], self._scale)
            for entry, grad in zip(sparse, averaged, strict=True):
                entry.param.grad = grad * factor if factor != 1.0 else grad
        if dense:
            layout = Layout(dense, self._plan.bucket_bytes, {e.index for e in dense})
            for bucket in layout.buckets:
                bucket.complete(self.marks, self._scale)
                self.lane.wait(launch_sum(self.lane, bucket.flat, -1))
                if factor != 1.0:
                    bucket.flat.mul_(factor)
                bucket.hand_out(None)
            for entry in dense:
                entry.bucket = None

    def _drop(self) -> None:
        """The step came to nothing: no rank keeps a gradient of it."""
        for entry in self.entries:
            if entry.param.requires_grad:
                entry.param.grad = None
        for bucket in self._layout.buckets:
            bucket.reset()
            for entry in bucket.entries:
                entry.kept = None

    def _learn(self, headers: Headers) -> None:
        """Lay the buckets out anew when the header told something new; equal on all ranks."""
        said = headers.marks[0] if headers.same_marks else b""
        if self.learned and said and said == self._last_marks:
            return
        self._last_marks = said
        used, repeated = headers.any(Mark.USED), headers.any(Mark.REPEATED)
        sparse, trainable = headers.any(Mark.SPARSE), headers.any(Mark.TRAINABLE)
        changed = False
        for entry in self.entries:
            if sparse[entry.index] and not entry.sparse:
                entry.sparse = changed = True
            if repeated[entry.index] and entry.index not in self._held:
                self._held.add(entry.index)
                changed = True
        if not self.learned and any(used):
            self._learn_order()
            self.learned = changed = True
        wanted = {e.index for e in self.entries if trainable[e.index] and not e.sparse}
        if changed or wanted != self._layout.indices:
            self.lay_out()

    def _learn_order(self) -> None:
        """The order in which gradients arrived on rank 0; what did not arrive comes last."""
        order = torch.tensor(list(dict.fromkeys(self._arrivals + self.order)), dtype=torch.int64)
        self.lane.run(lambda: self.lane.groups.control.broadcast(order, 0), "the order of the buckets")
        self.order = order.tolist()

    def lay_out(self) -> None:
        """Make the buckets, from what is agreed."""
        for entry in self.entries:
            entry.bucket = None
        chosen = [self.entries[i] for i in self.order]
        self._layout = Layout(
            (e for e in chosen if self.marks[e.index] & Mark.TRAINABLE and not e.sparse),
            self._plan.bucket_bytes,
            self._held,
        )
        # Those without a bucket: frozen now, or sparse.
        self._apart = [entry for entry in self.entries if entry.bucket is None]
        self.lane.describe = self._layout.describe

    def state_dict(self) -> dict[str, object]:
        """What is agreed and learned, by parameter name."""
        return {
            "order": [self._names[index] for index in self.order],
            "held": sorted(self._names[index] for index in self._held),
            "learned": self.learned,
            "unit": self._unit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        index = {name: i for i, name in enumerate(self._names)}
        if sorted(state["order"]) != sorted(self._names):
            strange = sorted(set(state["order"]) ^ set(self._names))[:3]
            raise ValueError(f"this state is of another model: it does not agree about the parameters {strange}")
        self.order = [index[name] for name in state["order"]]
        self._held = {index[name] for name in state["held"]}
        self.learned = bool(state["learned"])
        self._unit = float(state["unit"])
        self.lay_out()

    @property
    def num_buckets(self) -> int:
        return len(self._layout.buckets)

    def _reset(self) -> None:
        self.marks[:] = self._nothing_used
        self.weight = None
        self.backwards = 0
        self._next = 0
        self._tickets = []
        self._header = None
        self._arrivals = []
        self._nonfinite = -1
        self._blocked = False
        self._held_up_by = None
        self.lane.step += 1
        self.lane.at(Phase.COMPUTING)

    # Small facts

    def _local_scale(self) -> float:
        if self._plan.combine == "sum":
            return 1.0
        self._scale_unit = self._unit
        weight = 1.0 if self.weight is None else self.weight
        return weight / (self.lane.groups.size * self._k * self._unit)

    def _set_unit(self, headers: Headers) -> None:
        mean = headers.total_weight() / (self.lane.groups.size * self._k)
        if headers.flagged(Flag.WEIGHTED) and mean > 0:
            self._unit = 2.0 ** math.floor(math.log2(mean))
        else:
            self._unit = 1.0

    def _on_device(self) -> bool:
        """Whether the host only queues the waiting, and a device does it."""
        return any(not channel.on_host for channel in self.lane.groups.data.values())

    def _close_record(self) -> None:
        spans = [(t.launched_at, t.finished_at) for t in self._tickets if t.finished_at]
        nbytes = sum(ticket.nbytes for ticket in self._tickets)
        self.recorder.finish_step(self.lane.step, spans, nbytes, len(self._tickets), self._held_up_by)

    def _find_nonfinite(self, gradients: Iterable[tuple[Entry, torch.Tensor]]) -> None:
        for entry, grad in gradients:
            if not bool(grad.to_dense().isfinite().all()):
                self._nonfinite = entry.index
                return

    def _warn_if_same_data(self, headers: Headers) -> None:
        digests = {head.digest for head in headers.heads}
        if len(headers.heads) > 1 and len(digests) == 1 and digests != {_NO_DIGEST}:
            warnings.warn(
                "the first gradients are bitwise equal on all ranks: every rank seems to see the same data. "
                "Give each its own share, for example with torch.utils.data.DistributedSampler",
                stacklevel=2,
            )


def _sparse_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """The gradient, or an empty sparse one."""
    if param.grad is not None:
        return param.grad if param.grad.is_sparse else param.grad.to_sparse(1)
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    return torch.sparse_coo_tensor(indices, param.new_empty(0, *param.shape[1:]), param.shape, check_invariants=False)


def _digest(entries: list[Entry]) -> bytes:
    """Of the local gradients, to see whether two ranks had the same; zeros if there is none."""
    sums = []
    for entry in entries:
        grad = entry.param.grad
        if grad is not None and not grad.is_sparse and grad.numel():
            real = torch.view_as_real(grad) if grad.is_complex() else grad
            sums.append(int(real.contiguous().view(_BITS[real.element_size()]).sum(dtype=torch.int64)))
    if not any(sums):
        return _NO_DIGEST
    return hashlib.blake2b(struct.pack(f"<{len(sums)}q", *sums), digest_size=8).digest()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
