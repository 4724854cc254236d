"""The bucket order: which buckets there are and in which order they leave. Agreed: equal on all ranks at any time.

It changes only by what a header told everybody: the order of arrival after the first synchronization, and
later parameters that were frozen, thawed, turned out sparse, or arrived twice in one backward.
"""

from __future__ import annotations

import torch

from gradsync.agreement.attach_check import check_forms
from gradsync.agreement.header import Headers, Mark
from gradsync.checkpoint.format import Arrangement
from gradsync.engine.bucket import Bucket, GradEntry, Layout
from gradsync.exchange.flat import Allocate
from gradsync.exchange.sender import Sender
from gradsync.transport.lane import Lane


class BucketOrder:
    """The buckets, their order, and what was learned about it."""

    def __init__(
        self,
        entries: list[GradEntry],
        bucket_bytes: int | None,
        lane: Lane,
        allocate: Allocate,
        sender: Sender,
        idle: bool = False,
    ) -> None:
        """`idle`: nothing travels in these buckets, so there are none."""
        self._entries = entries
        self._bucket_bytes = bucket_bytes
        self._lane = lane
        self._allocate = allocate
        self._sender = sender
        self._names = [entry.name for entry in entries]
        self._order = list(reversed(range(len(entries))))
        self._held: set[int] = set()  # arrive more than once in a backward: leave at its end
        self.learned = False  # whether the order is that of arrival
        self.last_marks = b""  # what any rank said in the last step
        self._idle = idle
        self._layout = Layout([], bucket_bytes, self._held)
        self._lay_out(bytes(entry.param.requires_grad for entry in entries))

    def learn(self, headers: Headers, arrivals: list[int]) -> None:
        """Lay the buckets out anew if the header told something new."""
        if self.learned and headers.marks == self.last_marks:
            return
        self.last_marks = headers.marks
        changed = self._learn_kinds(headers)
        if not self.learned and any(headers.any(Mark.USED)):
            self._learn_order(arrivals)
            self.learned = changed = True
        trainable = headers.any(Mark.TRAINABLE)
        wanted = {e.index for e in self._entries if trainable[e.index] and not e.sparse}
        if changed or wanted != self._layout.indices:
            self._lay_out(trainable)

    def _learn_kinds(self, headers: Headers) -> bool:
        """Learn which parameters are sparse, and which arrive more than once; return True if that is new."""
        sparse, repeated = headers.any(Mark.SPARSE), headers.any(Mark.REPEATED)
        changed = False
        for entry in self._entries:
            if sparse[entry.index] and not entry.sparse:
                entry.found_sparse()
                changed = True
            if repeated[entry.index] and entry.index not in self._held:
                self._held.add(entry.index)
                changed = True
        return changed

    def _learn_order(self, arrivals: list[int]) -> None:
        """The order in which gradients arrived on rank 0; what did not arrive comes last."""
        order = torch.tensor(list(dict.fromkeys(arrivals + self._order)), dtype=torch.int64, device="cpu")
        told = self._lane.hear_first(order.view(torch.uint8), "the order of the buckets")
        self._order = told.view(torch.int64).tolist()

    def _lay_out(self, trainable: bytes) -> None:
        if self._idle:
            trainable = bytes(len(self._entries))
        chosen = [self._entries[index] for index in self._order if trainable[index] and not self._entries[index].sparse]
        layout = Layout(chosen, self._bucket_bytes, self._held, self._sender.choose)
        if not self._idle:
            check_forms(self._lane, [(form.numel, form.dtype) for form in layout.forms])
        # Gradients often arrive in the order that was expected: then no memory is taken a second time.
        if not layout.same_as(self._layout):
            for entry in self._entries:
                entry.move_out()
            layout.place(self._allocate)
            self._layout = layout
        if not self._idle:  # otherwise the sender is the pace's
            # The first synchronization is exact: compressors begin when the order is known.
            self._sender.prepare([bucket.flat_bucket for bucket in self._layout.buckets], compress=self.learned)
        self.buckets: list[Bucket] = self._layout.buckets
        self.fingerprints = self._layout.fingerprints  # in the order in which they were laid out
        self.layout_hash = self._layout.layout_hash  # a number that is equal on two ranks iff their buckets are
        # Those without a bucket: frozen now, or sparse.
        self.unbucketed = [entry for entry in self._entries if entry.bucket is None]
        if not self._idle:
            self._lane.name_buckets(self._layout.describe)

    def arrangement(self) -> Arrangement:
        """Return what was learned, by parameter name."""
        order = [self._names[index] for index in self._order]
        return Arrangement(order, sorted(self._names[index] for index in self._held), self.learned)

    def arrange(self, arrangement: Arrangement) -> None:
        """Lay the buckets out as another run did; every rank calls this at once, and knows all the names."""
        index = {name: i for i, name in enumerate(self._names)}
        self._order = [index[name] for name in arrangement.order]
        self._held = {index[name] for name in arrangement.held}
        self.learned = arrangement.learned
        self._layout = Layout([], self._bucket_bytes, self._held)  # what the old flat buckets keep must not come along
        self._lay_out(bytes(entry.param.requires_grad for entry in self._entries))
