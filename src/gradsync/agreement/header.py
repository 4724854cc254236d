"""The step header: a few bytes that travel with every synchronization and make it safe.

One fixed head and one byte of marks per parameter. It serves unused parameters, the weighted mean, join, the no_sync
mismatch, later freezing, sparsity, the NaN vote, the order of the buckets, and the comparison of replicas and loss
scales. Its length is fixed at attach, so it can never abort a transport, whatever state a rank is in.

Note [Headers add up]
    What a step needs of all headers does not grow with the ranks: whether fields are the same everywhere, the union of
    the marks and flags, and the sum of the weights. So a rank's row is written such that rows merge into one of the
    same form, see `merged`, on their way through the control tree. Only where something differs that should not, or
    where a rank has something to tell, every rank's row is fetched, and the sentences name ranks and parameters:

        row      total weight, ranks │ flags │ head │ ~head │ head of who takes part │ ~that │ marks
        merged       sum               or      or     or      or                      or      or

    A field is the same everywhere iff no bit of it is set in the one union and in the other. A rank that is out of data
    or whose backward raised says nothing in the last two: the others need not be where it is.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from gradsync.transport.lane import Lane

_HEAD = struct.Struct("<qQdiiiI8siqQ8sdi")
_SUMS = struct.Struct("<dqII")  # total weight, number of ranks, flags, notes
_SUM = struct.Struct("<dq")  # of these, what adds up
_UNIONS_AT, _HEADS_AT = _SUM.size, _SUMS.size
_MARKS_AT = _HEADS_AT + 4 * _HEAD.size
NO_DIGEST = NO_REPLICA_DIGEST = bytes(8)
DIGEST_COMES_LATER = (1).to_bytes(8, "little")  # said of a replica while its GPU still computes the digest


class Mark:
    """The bits of a byte in which a rank describes one parameter. Plain numbers, since every gradient sets one."""

    USED = 1  # its gradient changed since the last synchronization
    TRAINABLE = 2
    REPEATED = 4  # its hook fired twice in one backward: reentrant checkpointing
    SPARSE = 8  # its gradient is sparse
    FROZEN = 16  # not trainable; this and the next follow from the others, and stay visible when marks are merged
    DENSE = 32  # used, and not sparse


_BITS = (Mark.USED, Mark.TRAINABLE, Mark.REPEATED, Mark.SPARSE, Mark.DENSE)
_HAS = {bit: bytes(1 if marks & bit else 0 for marks in range(256)) for bit in _BITS}
_SAID = 15  # the marks that a rank sets


def _told(marks: int) -> int:
    """The marks of one parameter with those that follow from them."""
    dense = marks & Mark.USED and not marks & Mark.SPARSE
    return (marks & _SAID) | (0 if marks & Mark.TRAINABLE else Mark.FROZEN) | (Mark.DENSE if dense else 0)


_TOLD = bytes(_told(marks) for marks in range(256))
_TORN = bytes(1 if marks & Mark.TRAINABLE and marks & Mark.FROZEN else 0 for marks in range(256))
_INVERTED = bytes(255 - byte for byte in range(256))


class Flag:
    """The bits in which a rank describes its whole step. Plain numbers too: a step asks a dozen times."""

    NONE = 0
    ABORTED = 1  # its backward raised: nobody may use this step
    WEIGHTED = 2  # its batch weight was set by the user
    SHADOW = 4  # it is out of data and only keeps the others company
    FORWARD = 8  # with ABORTED: it was its forward that raised
    LOADER = 16  # with ABORTED: it was its loader


class Note:
    """The bits that follow from a head, and stay visible when headers are merged."""

    NONE = 0
    NONFINITE = 1  # its gradients have a NaN or Inf
    NO_REPLICA = 2  # it says nothing of its replica in this step
    NO_SCALE = 4  # nor of its loss scale
    LATER = 8  # its GPU still computes the digest of its replica: all announce the same one again


class Head(NamedTuple):
    """The fixed part of a header."""

    step: int
    layout_hash: int  # hash of the agreed bucket layout
    weight: float
    backwards: int  # backward calls since the last synchronization
    nonfinite: int  # index of the first parameter with NaN or Inf, or -1
    micro_batches: int
    flags: int
    digest: bytes  # of the first step's local gradients, zeros later; in other calls, a word of theirs
    call: int = 0  # what ranks meet for; see `Call`
    num_nonfinite: int = 0  # elements of that first parameter that are NaN or Inf
    order: int = 0  # hash of the buckets as this rank launches them
    replica_digest: bytes = NO_REPLICA_DIGEST  # digest of a part of its replica
    loss_scale: float = 0.0  # its GradScaler's; 0: it has none, or cannot say yet
    num_steps: int = -1  # of its optimizers since the last synchronization; -1: it does not say


def _bits_of(*names: str) -> int:
    """The bits of these fields in a packed head, read as one number."""
    bits = 0
    for name in names:
        index = Head._fields.index(name)
        begin, end = (struct.calcsize(_HEAD.format[: 1 + _FORMATS[at]]) for at in (index, index + 1))
        bits |= ((1 << 8 * (end - begin)) - 1) << 8 * begin
    return bits


# Where the code of each field ends in the format: "<q", "<qQ" …, "<qQdiiiI8s" …
_FORMATS = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15, 16]
_EVERYWHERE = _bits_of("call", "order")  # the same on all ranks, or they are not in one synchronization
_TAKING_PART = _bits_of("step", "layout_hash", "num_steps", "backwards")  # on all that take part
_REPLICA, _SCALE, _DIGEST = _bits_of("replica_digest"), _bits_of("loss_scale"), _bits_of("digest")
_NUM_STEPS, _BACKWARDS = _bits_of("num_steps"), _bits_of("backwards")
CALL, ORDER = _bits_of("call"), _bits_of("order")
ALIKE = _bits_of("step", "backwards")  # of an exchange of a pace
ALIKE_IN_SCALE = ALIKE | _bits_of("weight")
ALL_FIELDS = _bits_of(*Head._fields)


class Headers:
    """All ranks' headers of one synchronization: merged, and each by itself where they came or were fetched."""

    def __init__(self, rows: torch.Tensor) -> None:
        """The `rows` are every rank's, or one that was merged of all."""
        said = bytes((rows[0] if len(rows) == 1 else merged(rows)).numpy())
        self._rows = rows
        self.total_weight, self.size, self.flags, self.notes = _SUMS.unpack_from(said)
        size = _HEAD.size
        numbers = [int.from_bytes(said[at : at + size], "little") for at in range(_HEADS_AT, _MARKS_AT, size)]
        self._differ, self._differ_taking_part = numbers[0] & numbers[1], numbers[2] & numbers[3]
        self._said = said
        self.marks = said[_MARKS_AT:]  # the union of all ranks' marks
        self.used = self.any(Mark.USED)  # 1 for each parameter of which any rank has a gradient

    @property
    def whole(self) -> bool:
        """True if every rank's own header is here."""
        return len(self._rows) == self.size

    @cached_property
    def heads(self) -> list[Head]:
        """Every rank's head, by index in the group."""
        assert self.whole, "the headers were merged, and not fetched: they told nothing that needs names"
        return [Head(*_HEAD.unpack_from(bytes(row[_HEADS_AT:_MARKS_AT].numpy()))) for row in self._rows]

    def marks_of(self, index: int) -> list[int]:
        """Every rank's marks of one parameter."""
        assert self.whole, "the headers were merged, and not fetched"
        column: list[int] = self._rows[:, _MARKS_AT + index].tolist()
        return column

    def any(self, mark: int) -> bytes:
        """One byte per parameter: 1 where any rank set `mark`."""
        return self.marks.translate(_HAS[mark])

    def flagged(self, flag: int) -> list[int]:
        """The ranks (by index in the group) that set `flag`."""
        return [rank for rank, head in enumerate(self.heads) if head.flags & flag] if self.flags & flag else []

    # What is the same everywhere; each of these is told by the merged headers alone

    def differ_in(self, bits: int) -> bool:
        """Return whether ranks differ in any of these fields."""
        return bool(self._differ & bits)

    @property
    def same_place(self) -> bool:
        """True if all that take part are in the same synchronization, and with the same parameters trainable."""
        return not self._differ_taking_part & _TAKING_PART and 1 not in self.marks.translate(_TORN)

    @property
    def replicas_differ(self) -> bool:
        """True if what ranks say of their replicas differs; False if one says nothing."""
        return not self.notes & Note.NO_REPLICA and self.differ_in(_REPLICA)

    @property
    def scales_differ(self) -> bool:
        """True if the ranks' loss scales differ; False if one says nothing."""
        return not self.notes & Note.NO_SCALE and self.differ_in(_SCALE)

    @property
    def digest(self) -> bytes | None:
        """The word that all ranks brought; None if they differ."""
        if self.differ_in(_DIGEST):
            return None
        return Head(*_HEAD.unpack_from(self._said, _HEADS_AT)).digest

    def needs_names(self, alike: int) -> bool:
        """Return whether it matters who said what; the same on all ranks. `alike`: more fields that must not differ."""
        return bool(
            self.flags & Flag.ABORTED
            or self.notes & Note.NONFINITE
            or self.differ_in(_EVERYWHERE | alike)
            or not self.same_place
            or self.replicas_differ
            or self.scales_differ
        )


def header_nbytes(num_parameters: int) -> int:
    """Return the length of a header, in bytes."""
    return _MARKS_AT + num_parameters


def pack_header(head: Head, marks: bytes | bytearray) -> torch.Tensor:
    """The header as a row of bytes: see [Headers add up]."""
    notes = Note.NONFINITE if head.nonfinite >= 0 else 0
    if head.replica_digest == NO_REPLICA_DIGEST:
        notes |= Note.NO_REPLICA
    elif head.replica_digest == DIGEST_COMES_LATER:
        notes |= Note.NO_REPLICA | Note.LATER
    notes |= 0 if head.loss_scale else Note.NO_SCALE
    sums = _SUMS.pack(head.weight * head.micro_batches, 1, head.flags, notes)
    packed = _HEAD.pack(*head)
    inverted = packed.translate(_INVERTED)
    if head.flags & _OUT:
        taking_part = _NOTHING
    elif head.num_steps < 0 or head.flags & Flag.WEIGHTED:
        silent = (_NUM_STEPS if head.num_steps < 0 else 0) | (_BACKWARDS if head.flags & Flag.WEIGHTED else 0)
        taking_part = _without(packed, silent) + _without(inverted, silent)
    else:
        taking_part = packed + inverted
    row = bytearray(sums + packed + inverted + taking_part + marks.translate(_TOLD))
    return torch.frombuffer(row, dtype=torch.uint8)


_NOTHING = bytes(2 * _HEAD.size)
_OUT = Flag.SHADOW | Flag.ABORTED


def _without(packed: bytes, bits: int) -> bytes:
    return (int.from_bytes(packed, "little") & ~bits).to_bytes(len(packed), "little")


def merged(rows: torch.Tensor) -> torch.Tensor:
    """One row that says of all what each said of itself; the weights are added in the order of the rows."""
    every = rows.numpy()
    row = np.bitwise_or.reduce(every, axis=0)
    weight, count = 0.0, 0
    for more_weight, more in _SUM.iter_unpack(every[:, :_UNIONS_AT].tobytes()):
        weight, count = weight + more_weight, count + more
    _SUM.pack_into(row, 0, weight, count)
    return torch.from_numpy(row)


class HeaderExchange:
    """Headers under way."""

    def __init__(self, lane: Lane, head: Head, marks: bytes | bytearray, alike: int = 0, each: bool = False) -> None:
        """Start it; `alike` are more fields in which ranks must not differ without their being named.

        `each`: every rank's own is wanted, unless all say the same.
        """
        self._lane = lane
        self._enough: Headers | None = None  # the merged ones, read on their way, where nobody is to be named

        def ask(row: torch.Tensor) -> bool:
            headers = Headers(row[None])
            more = headers.needs_names(alike) or (each and headers.differ_in(ALL_FIELDS))
            self._enough = None if more else headers
            return more

        self.pending = lane.merge_all(pack_header(head, marks), merged, "the step header", ask)

    def receive(self, timeout: float | None = None) -> Headers:
        """Wait until every rank's is here; where somebody is to be named, each by itself."""
        self._lane.wait(self.pending, timeout)
        headers = self._enough or Headers(self.pending.rows)
        assert headers.size == self._lane.groups.size, "every rank's header is in it once"
        return headers
