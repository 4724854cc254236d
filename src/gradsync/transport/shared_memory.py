"""The ranks of one host as a team that reduces in shared memory; the work itself is C, see kernels/native/team.c.

A team has three streams, each with its own order of operations:

    BOARD   small messages from each to all: step headers
    WORKER  sums that a thread of the library makes beside the computation, or the caller itself
    LANE    sums and exchanges of ranges that the lane's own thread asks for: hierarchical, tensors of GPUs

Waiting is in slices, so that the caller can look after the peers and Ctrl-C is heard; see [Waiting] in `waiting`.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable, Sequence

import torch

from gradsync.kernels.library import CODES, LABEL_NBYTES, NUM_SLOTS, NUM_STREAMS, Op, OpKind, Progress, load
from gradsync.transport.segments import Exchange, Segment, allocate

BOARD, WORKER, LANE = range(NUM_STREAMS)
Pointers = ctypes.Array[ctypes.c_void_p]  # one for each rank

PLACE = b" @ "  # what stands before the place on a label

_ROW_NBYTES = 16 << 10  # data up to this size travels on the boards, in one go
_PIECE_NBYTES = 1 << 20  # the most that goes through a window at once: fewer waits for each other
_WINDOWS_NBYTES = 8 << 20  # all windows of a team: they stay in the cache that the cores share
_SPIN = 4000  # looks before a wait sleeps, where every rank has a core


class TeamError(RuntimeError):
    """An operation of the team failed: somebody died, or it was given up."""


def label_of(flat: torch.Tensor, step: int, bucket: int) -> bytes:
    """Return what ranks compare before they touch anything."""
    return f"bucket {bucket} step {step % 10**6}: {flat.numel()} {str(flat.dtype).removeprefix('torch.')}".encode()


class LabelsDiffer(Exception):
    """The ranks came to different operations; each one's label, by local rank."""

    def __init__(self, labels: list[str]) -> None:
        super().__init__(str(labels))
        self.labels = labels


class Team:
    """This rank's part in a team."""

    def __init__(
        self, exchange: Exchange, members: Sequence[int], index: int, pidfds: dict[int, int], board_nbytes: int
    ) -> None:
        """Every rank of the group calls this at once; `members` are those of this host, `index` is this rank."""
        library = load()
        assert library is not None, "a team needs the C library"
        self._library = library
        self.members = tuple(members)
        self.size = len(members)
        self.rank = self.members.index(index)
        self._exchange = exchange
        self._board_nbytes = board_nbytes
        self._num_segments = 0
        self._segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        rows = _numbers(board_nbytes, LABEL_NBYTES + _ROW_NBYTES, LABEL_NBYTES + _ROW_NBYTES)
        # In SHED every rank has a line of it at least.
        piece = max(4096, 64 * self.size, min(_PIECE_NBYTES, _WINDOWS_NBYTES // (NUM_SLOTS * self.size)))
        windows = _numbers(0, piece, piece)
        self._arena, arena = allocate(exchange, members, index, library.gradsync_arena_nbytes(self.size, rows, windows))
        # Of our own: liveness closes its when it ends, and their numbers may then mean something else.
        self._pidfds = [os.dup(pidfds[member]) if member in pidfds else -1 for member in members]
        fds = (ctypes.c_int * self.size)(*self._pidfds)
        spin = _SPIN if self.size <= len(os.sched_getaffinity(0)) else 0
        self._team = library.gradsync_open(self.size, self.rank, arena.bases(0), fds, rows, windows, spin)
        if not self._team:
            raise MemoryError("no memory for a team")
        self._pid = os.getpid()

    # Memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes that the team reduces in place; every rank of the group calls this with the same number."""
        me, number = self.members[self.rank], self._num_segments + 1
        memory, segment = allocate(self._exchange, self.members, me, nbytes, number)
        self._num_segments = number
        self._segments[segment.begin] = segment
        return memory

    def locate(self, flat: torch.Tensor) -> tuple[Segment, int] | None:
        """The segment in which `flat` lies, and where; None if it does not lie in the team's memory."""
        pointer = flat.data_ptr()
        for begin, segment in self._segments.items():
            if begin <= pointer < begin + segment.nbytes:
                return segment, pointer - begin
        return None

    # Sums

    def sum_op(self, flat: torch.Tensor, label: bytes, scale: float = 1.0, in_place: bool = True) -> Op:
        """The operation that adds up `flat` over the team, in the way that suits its size and place.

        `in_place`: where it lies in the team's memory, reduce it there. Ranks must do the same, so the label
        then names the place.
        """
        count = flat.numel()
        op = Op(label, flat.data_ptr(), None, None, count, scale, OpKind.STAGED, CODES[flat.dtype])
        if count * flat.element_size() <= _ROW_NBYTES:
            op.kind = OpKind.SMALL
        elif in_place and (found := self.locate(flat)) is not None:
            segment, offset = found
            op.kind, op.bases = OpKind.DIRECT, ctypes.addressof(segment.bases(offset))
            op.label = (label + b"%s%d+%x" % (PLACE, segment.number, offset))[:LABEL_NBYTES]
        return op

    # What is not the same on all: parts for each rank, through the windows

    def shed_op(self, mine: torch.Tensor, parts: Pointers, label: bytes, scale: float = 1.0) -> Op:
        """`mine` becomes the sum of what all have for this rank; `parts`: where this rank has what each is to get.

        Of that the caller keeps `parts` and the memory behind it until the operation is done.
        """
        pointer, code = ctypes.addressof(parts), CODES[mine.dtype]
        return Op(label, mine.data_ptr(), pointer, None, mine.numel(), scale, OpKind.SHED, code)

    def share_op(self, mine: torch.Tensor, parts: Pointers, label: bytes) -> Op:
        """Return the operation that gives all `mine`; `parts`: where what each brings goes. Bytes, of any dtype."""
        pointer, code = ctypes.addressof(parts), CODES[torch.int8]
        return Op(label, mine.data_ptr(), pointer, None, mine.nbytes, 1.0, OpKind.SHARE, code)

    # At work

    def advance(self, stream: int, op: Op, slice_s: float) -> bool:
        """Go on with an operation in this thread, for at most about `slice_s`; whether it is done."""
        result = self._library.gradsync_advance(self._team, stream, op, slice_s)
        if result == Progress.MISMATCH:
            raise _labels(self._library.gradsync_label(self._team, stream, rank) for rank in range(self.size))
        return result == Progress.DONE or self._judge(result, op.culprit)

    def submit(self, op: Op) -> Job:
        """Have the worker do it."""
        handle = self._library.gradsync_submit(self._team, op)
        if not handle:
            raise MemoryError("no memory or no thread for an operation of the team")
        return Job(self, handle)

    # Messages

    def fits(self, row: torch.Tensor) -> bool:
        """Return whether a message of this length can go by the boards."""
        return row.numel() <= self._board_nbytes

    def post(self, row: torch.Tensor) -> None:
        """Say something to all; never waits. The one before must have been collected."""
        self._library.gradsync_post(self._team, BOARD, row.data_ptr(), row.numel())

    def collect(self, rows: torch.Tensor, slice_s: float) -> bool:
        """Fill `rows` with what each said; False if somebody has not yet."""
        culprit = ctypes.c_int(-1)
        result = self._library.gradsync_collect(self._team, BOARD, rows.data_ptr(), rows.shape[1], slice_s, culprit)
        return result == Progress.DONE or self._judge(result, culprit.value)

    # The end

    def abort(self) -> None:
        """End all waits of this rank: it leaves."""
        if self._team:
            self._library.gradsync_abort(self._team)

    def abandon(self) -> None:
        """This rank gives up: nothing that is under way will be completed, by anybody."""
        if self._team:
            self._library.gradsync_abandon(self._team)

    def close(self) -> None:
        # A forked child has no worker to join.
        if self._team and os.getpid() == self._pid:
            self._library.gradsync_close(self._team)
            for fd in self._pidfds:
                if fd >= 0:
                    os.close(fd)
        self._team = None
        # The lane's own method: with it the two would keep each other, and the lane the store, until a collection.
        self._exchange = _closed

    def _judge(self, result: int, culprit: int) -> bool:
        if result == Progress.PENDING:
            return False
        if result == Progress.DEAD:
            raise TeamError(f"rank {self.members[culprit]} ended while others waited for it")
        raise TeamError("the operation was given up")


def _closed(_: bytes) -> list[bytes]:
    raise TeamError("the team is closed")


class Job:
    """An operation that the worker has."""

    def __init__(self, team: Team, handle: int) -> None:
        self._team = team
        self._handle = handle
        self.finished_at = 0.0

    def wait(self, slice_s: float) -> bool:
        """Wait for at most `slice_s`, and return whether it has ended well."""
        library, finished_at, culprit = self._team._library, ctypes.c_double(), ctypes.c_int()
        result = library.gradsync_wait(self._team._team, self._handle, slice_s, finished_at, culprit)
        if result == Progress.PENDING:
            return False
        self.finished_at = finished_at.value
        if result == Progress.MISMATCH:  # the worker may be further by now: the job has kept them
            raise _labels(library.gradsync_job_label(self._handle, rank) for rank in range(self._team.size))
        return result == Progress.DONE or self._team._judge(result, culprit.value)

    def __del__(self) -> None:
        self._team._library.gradsync_release(self._handle)


def _labels(pointers: Iterable[int]) -> LabelsDiffer:
    texts = [ctypes.string_at(pointer, LABEL_NBYTES) for pointer in pointers]
    return LabelsDiffer([text.rstrip(b"\0").decode(errors="replace") for text in texts])


def _numbers(*values: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)
