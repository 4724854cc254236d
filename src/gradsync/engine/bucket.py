"""Parameters and the flat buckets in which their gradients travel.

Every bucket is one flat tensor of one dtype on one device, which travels in one way. Inside it small gradients
stand first and together, so that they are copied and scaled by two calls; a large one is copied by its own hook,
while it is still in the cache.

    flat  │ small small small … │ large │ large │
            └── copied when ──┘   └ copied when the
                the bucket is       gradient arrives
                full
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, MutableMapping

import torch

from gradsync.agreement.header import Mark
from gradsync.compress.recipe import EXACT, Choice
from gradsync.exchange.flat import Allocate, Choose, FlatBucket, Form, Item, lay_out, pack_items
from gradsync.plan.packing import default_limit
from gradsync.transport.current_stream import current_stream

_LARGE_NBYTES = 1 << 16  # a CPU copies this much in less time than Python needs to ask for it


class GradEntry:
    """One parameter: where it lives in the model, and where its gradient lives in a bucket."""

    __slots__ = (
        "bucket", "filled", "index", "kept", "key", "large", "name", "owner", "param", "ptr", "sparse", "view",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        name: str,
        param: torch.nn.Parameter,
        owner: MutableMapping[str, object],
        key: str,
        sparse: bool,
    ) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.owner = owner  # the module's own table of parameters, to notice a replacement
        self.key = key
        self.sparse = sparse
        # Where its gradient travels; None while it is frozen or sparse.
        self.bucket: Bucket | None = None
        self.view = torch.empty(0, dtype=torch.float32, device="cpu")
        self.ptr = 0
        self.large = False
        # The synchronization under way.
        self.filled = False  # its gradient is in the bucket
        self.kept: torch.Tensor | None = None  # what stood in the bucket, in case no rank uses it

    @property
    def item(self) -> Item:
        """The item for which a flat tensor needs to have room: its gradient."""
        return Item.like(self.name, self.param)

    def follow(self, owner: MutableMapping[str, object], key: str) -> None:
        """Take the parameter from here from now on."""
        self.owner, self.key = owner, key

    def replace_param(self, param: torch.nn.Parameter) -> None:
        """Another parameter stands in the place of the one before."""
        self.param = param

    def move_in(self, bucket: Bucket, view: torch.Tensor, large: bool) -> None:
        """Let its gradient travel in this bucket from now on, and lie in this view of it."""
        self.bucket, self.view, self.large = bucket, view, large
        self.ptr = view.data_ptr()
        self.filled = False

    def move_out(self) -> None:
        """The gradient travels in no bucket from now on."""
        self.bucket = None

    def found_sparse(self) -> None:
        """Note that its gradients are sparse: it travels in no bucket."""
        self.sparse = True

    def drop(self) -> None:
        """The step came to nothing: no gradient of it stays."""
        self.kept = None
        if self.param.requires_grad:
            self.param.grad = None

    def leave(self) -> None:
        """Give up its buckets: a gradient that lies in one gets memory of its own."""
        grad = self.param.grad
        if grad is not None and grad._is_view():
            self.param.grad = grad.clone()
        self.kept = None

    def take(self, scale: float) -> None:
        """Move the gradient into the bucket, scaled; `.grad` is None afterwards."""
        grad = self.param.grad
        assert grad is not None
        if grad.is_sparse:
            grad = grad.to_dense()
        if scale == 0.0:
            self.view.zero_()  # weight 0 brings nothing: 0 · NaN would be NaN
        elif self.filled:
            self.view.add_(grad, alpha=scale)
        elif grad.data_ptr() == self.ptr:
            self.view.mul_(scale)
        else:
            torch.mul(grad, scale, out=self.view)
        self.param.grad = None
        self.filled = True


class Bucket:
    """A flat tensor and the parameters whose gradients fill it."""

    __slots__ = (
        "_first",
        "_gpu",
        "_items",
        "_small_params",
        "_small_views",
        "choice",
        "entries",
        "fingerprint",
        "flat",
        "flat_bucket",
        "form",
        "held",
        "index",
        "large",
        "on_gpu",
        "small",
        "small_flat",
        "streams",
    )  # fmt: skip

    def __init__(self, index: int, entries: list[GradEntry], held: bool, choice: Choice) -> None:
        first = entries[0].param
        self.index = index
        self.choice = choice
        self.held = held  # leaves only when backward has ended
        self.on_gpu = first.is_cuda
        self.streams: dict[int, torch.cuda.Stream] = {}  # on which gradients of this step were computed
        everything_small = first.device.type != "cpu"  # on a GPU one kernel copies them all
        self.small = [e for e in entries if everything_small or e.param.nbytes < _LARGE_NBYTES]
        self.large = [e for e in entries if not everything_small and e.param.nbytes >= _LARGE_NBYTES]
        self.entries = self.small + self.large
        self._items, self.form = lay_out([entry.item for entry in self.entries])
        what = (index, str(first.dtype), self.form.numel, [entry.index for entry in self.entries], choice)
        self.fingerprint = zlib.crc32(repr(what).encode()).to_bytes(4, "little")  # equal iff buckets are

    def place(self, flat: torch.Tensor) -> None:
        """Live in `flat`, which has this bucket's form."""
        self.flat, self._first, self._gpu = flat, flat[:1], flat.device.index
        self.flat_bucket = FlatBucket(self.index, flat, self._items, self.choice)
        num_small = len(self.small)
        for number, (entry, item) in enumerate(zip(self.entries, self._items, strict=True)):
            entry.move_in(self, item.of(flat), large=number >= num_small)
        self.small_flat = flat[: self._items[num_small].start] if self.large else flat
        self._small_params = [entry.param for entry in self.small]
        self._small_views = [entry.view for entry in self.small]

    def describe(self) -> str:
        return self.flat_bucket.describe()

    def note_stream(self) -> None:
        """A gradient was computed on the current stream: remember it, for the copy may run on another."""
        raw = torch._C._cuda_getCurrentRawStream(self._gpu)
        if raw not in self.streams:
            self.streams[raw] = current_stream(self.flat.device)

    def complete(self, marks: bytearray, scale: float, whole: bool = False) -> None:
        """Put in what is not there yet: small gradients, and what stands in `.grad` of unused parameters.

        `whole`: every gradient has arrived.
        """
        if self.streams and self.streams.keys() != {torch._C._cuda_getCurrentRawStream(self._gpu)}:
            self._join_streams()
        for entry in self.large:
            if not entry.filled:
                self._stand_in(entry, bool(marks[entry.index] & Mark.USED), scale)
        if not whole or not self._copy_all_small():
            self._copy_small(marks)
        if scale == 0.0:
            self.flat.zero_()
        elif self.small and scale != 1.0:
            self.small_flat.mul_(scale)

    def _copy_all_small(self) -> bool:
        """The usual case, in as few Python steps as possible: every gradient arrived, none is sparse.

        A gradient that lies in the bucket already is copied onto itself, which does nothing.
        """
        params = self._small_params
        grads = [param.grad for param in params]
        if not grads:
            return True
        try:
            torch._foreach_copy_(self._small_views, grads)  # type: ignore[arg-type]
        except (RuntimeError, TypeError):
            return False  # one is sparse, or was taken away: look at each
        for param in params:
            param.grad = None
        return True

    def _copy_small(self, marks: bytearray) -> None:
        views, grads = [], []
        for entry in self.small:
            grad = entry.param.grad
            used = marks[entry.index] & Mark.USED
            if grad is None:
                entry.view.zero_()
            elif grad.is_sparse:
                marks[entry.index] |= Mark.SPARSE
                entry.view.copy_(grad.to_dense())
            elif grad.data_ptr() != entry.ptr:
                views.append(entry.view)
                grads.append(grad)
            elif not used:
                entry.kept = entry.view.clone()
            if used:
                entry.param.grad = None
        if views:
            torch._foreach_copy_(views, grads)

    def _join_streams(self) -> None:
        """The current stream waits for all others; their memory is not used again before it has read it."""
        current = current_stream(self.flat.device)
        for stream in self.streams.values():
            if stream != current:
                current.wait_stream(stream)
        for entry in self.entries:
            if entry.param.grad is not None and not entry.param.grad.is_sparse:
                entry.param.grad.record_stream(current)

    def _stand_in(self, entry: GradEntry, used: bool, scale: float) -> None:
        grad = entry.param.grad
        if grad is None:
            entry.view.zero_()
        elif used:
            entry.take(scale)
        else:
            if not grad.is_sparse and grad.data_ptr() == entry.ptr:
                entry.kept = entry.view.clone()
            torch.mul(grad.to_dense() if grad.is_sparse else grad, scale, out=entry.view)
        entry.filled = True

    def hand_out(self, used: bytes | None, factor: float = 1.0, alive: torch.Tensor | None = None) -> None:
        """Make `factor` times the sums the parameters' own gradients; `used` None means: all were used.

        `alive` is that of [Sums of an aborted communicator] in nccl_channel.py.
        """
        if factor != 1.0:
            self.flat.mul_(factor)
        if alive is not None and self.on_gpu:
            self._first.mul_(alive)
        for entry in self.entries:
            if used is None or used[entry.index]:
                entry.param.grad = entry.view
            elif entry.kept is not None:
                entry.view.copy_(entry.kept)
                entry.kept = None
        self.reset()

    def reset(self) -> None:
        """Be ready for the next step."""
        for entry in self.large:
            entry.filled = False
        self.streams.clear()


class Layout:
    """All buckets, in the order in which every rank launches them; `place` gives them memory."""

    def __init__(
        self,
        entries: Iterable[GradEntry],
        bucket_bytes: int | None,
        held: set[int],
        choose: Choose = lambda param: EXACT,
    ) -> None:
        entries = list(entries)
        limit = bucket_bytes or default_limit(sum(entry.param.nbytes for entry in entries))
        groups = _pack([e for e in entries if e.index not in held], limit, choose)
        late = _pack([e for e in entries if e.index in held], limit, choose)
        self.buckets = [Bucket(i, group, i >= len(groups), c) for i, (group, c) in enumerate(groups + late)]
        self.indices = frozenset(entry.index for entry in entries)
        self.fingerprints = tuple(bucket.fingerprint for bucket in self.buckets)
        self.layout_hash = zlib.crc32(b"".join(self.fingerprints))

    @property
    def forms(self) -> list[Form]:
        """The memory that it needs."""
        return [bucket.form for bucket in self.buckets]

    def place(self, allocate: Allocate) -> None:
        """Every rank does it at once: memory that ranks share is taken together."""
        for bucket, flat in zip(self.buckets, allocate(self.forms), strict=True):
            bucket.place(flat)

    def same_as(self, other: Layout) -> bool:
        """Return whether every gradient travels as in that one, at the same place and time."""
        mine, others = (
            [(b.form, b.held, b.fingerprint, [entry.index for entry in b.entries]) for b in layout.buckets]
            for layout in (self, other)
        )
        return mine == others

    def describe(self, bucket: int) -> str:
        return self.buckets[bucket].describe()


def _pack(entries: list[GradEntry], limit: int, choose: Choose) -> list[tuple[list[GradEntry], Choice]]:
    packed = pack_items([entry.item for entry in entries], limit, choose)
    return [([entries[number] for number in numbers], choice) for numbers, choice in packed]
