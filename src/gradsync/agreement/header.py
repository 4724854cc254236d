"""The step header: a few bytes that travel with every synchronization and make it safe.

One fixed head and one byte of marks per parameter, from every rank to every rank. It serves unused parameters, the
weighted mean, join, the no_sync mismatch, later freezing, sparsity, the NaN vote, the order of the buckets, and the
comparison of replicas and loss scales. Its length is fixed at attach, so it can never abort a transport, whatever
state a rank is in.

Everything else that all ranks do together after attach begins with such a header too, which says what it is. Gloo
aborts the process when sizes differ, and a rank may call `detach()` while another is in backward: so ranks that are
in different calls find out, and raise the same sentence.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import torch

from gradsync.errors import JOIN, Disagreement, listed
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Pending

_HEAD = struct.Struct("<qQdiiiI8siqQ8sdi")
HEAD_NBYTES = _HEAD.size
NO_DIGEST = NO_REPLICA_DIGEST = bytes(8)


class Mark:
    """What a rank says of one parameter: bits of a byte. Plain numbers, since every gradient sets one."""

    USED = 1  # its gradient changed since the last synchronization
    TRAINABLE = 2
    REPEATED = 4  # its hook fired twice in one backward: reentrant checkpointing
    SPARSE = 8  # its gradient is sparse


_HAS = {bit: bytes(1 if marks & bit else 0 for marks in range(256)) for bit in (1, 2, 4, 8)}


class Flag(enum.IntFlag):
    """What a rank says of its whole step."""

    NONE = 0
    ABORTED = 1  # its backward raised: nobody may use this step
    WEIGHTED = 2  # its batch weight was set by the user
    SHADOW = 4  # it is out of data and only keeps the others company
    FORWARD = 8  # with ABORTED: it was its forward that raised
    LOADER = 16  # with ABORTED: it was its loader


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


class Call(enum.IntEnum):
    """What ranks can meet for."""

    SYNCHRONIZE = 0
    VOTE = 1
    BROADCAST = 2
    LOAD = 3
    DETACH = 4
    GATHER = 5
    AVERAGE = 6
    NEIGHBOURS = 7
    DRAIN = 8
    PLAN = 9


_NAMES = {
    Call.SYNCHRONIZE: "a synchronization",
    Call.VOTE: "the vote of join()",
    Call.BROADCAST: "broadcast() or the end of join()",
    Call.LOAD: "load_state_dict()",
    Call.DETACH: "detach()",
    Call.GATHER: "state_dict(all_ranks=True)",
    Call.AVERAGE: "an average of its pace",
    Call.NEIGHBOURS: "an exchange with its neighbours",
    Call.DRAIN: "drain()",
    Call.PLAN: "the choice of a plan by gs.auto()",
}
_STEPS = {Call.SYNCHRONIZE, Call.VOTE}
_ENDS = {Call.DETACH, Call.DRAIN}  # what comes after the last batch


class Headers:
    """All ranks' headers of one synchronization."""

    def __init__(self, rows: torch.Tensor) -> None:
        raw = [bytes(row.numpy()) for row in rows]
        self.heads = [Head(*_HEAD.unpack_from(row)) for row in raw]
        self.marks = [row[HEAD_NBYTES:] for row in raw]
        self.same_marks = self.marks.count(self.marks[0]) == len(raw)
        self._rows = rows
        self.used = self.any(Mark.USED)  # 1 for each parameter of which any rank has a gradient
        # Weights times micro-batches, shadows excepted: their weight is zero.
        self.total_weight, self.flags, self.same_order = 0.0, 0, True
        for head in self.heads:
            self.total_weight += head.weight * head.micro_batches
            self.flags |= head.flags  # of any rank
            self.same_order &= head.order == self.heads[0].order

    def any(self, mark: int) -> bytes:
        """One byte per parameter: 1 where any rank set `mark`."""
        if self.same_marks:
            return self.marks[0].translate(_HAS[mark])
        return bytes((self._rows[:, HEAD_NBYTES:] & mark).amax(0).clamp(max=1).numpy())

    def flagged(self, flag: Flag) -> list[int]:
        """The ranks (by index in the group) that set `flag`."""
        return [rank for rank, head in enumerate(self.heads) if head.flags & flag]


def pack_header(head: Head, marks: bytearray) -> torch.Tensor:
    """The header as a tensor of bytes."""
    return torch.frombuffer(bytearray(_HEAD.pack(*head) + marks), dtype=torch.uint8)


def launch_header(lane: Lane, head: Head, marks: bytearray) -> tuple[Pending, torch.Tensor]:
    """Start the exchange of headers; the rows are valid when the pending is done."""
    row = pack_header(head, marks)
    rows = torch.empty(lane.groups.size, HEAD_NBYTES + len(marks), dtype=torch.uint8, device="cpu")
    return lane.tell_all(row, rows, "the step header"), rows


def meet(lane: Lane, call: Call, num_parameters: int, word: bytes = bytes(8), flags: Flag = Flag.NONE) -> list[Head]:
    """Wait until every rank is in this call; return what each brought: 8 bytes, and flags."""
    head = Head(lane.step, 0, 0.0, 0, -1, 0, flags, word, call)
    pending, rows = launch_header(lane, head, bytearray(num_parameters))
    lane.wait(pending)
    headers = Headers(rows)
    check_same_call(headers, lane.groups.ranks)
    return headers.heads


def check_same_call(headers: Headers, ranks: tuple[int, ...]) -> None:
    """Raise the same sentence everywhere if ranks are in different calls."""
    first = headers.heads[0].call
    for rank, head in enumerate(headers.heads):
        if head.call != first:
            raise Disagreement(
                f"rank {ranks[0]} is in {_NAMES[Call(first)]} but rank {ranks[rank]} is in {_NAMES[Call(head.call)]}; "
                f"{_way_out({Call(first), Call(head.call)})}"
            )


def _way_out(calls: set[Call]) -> str:
    if Call.VOTE in calls and Call.SYNCHRONIZE in calls:
        return "enter `with sync.join():` on every rank"
    if calls & _ENDS and calls & _STEPS:
        return JOIN
    if Call.DETACH in calls and calls & {Call.AVERAGE, Call.NEIGHBOURS}:  # paces that know no join()
        return "every rank must take equally many steps"
    return "every rank must call the same, in the same step"


def check_headers(headers: Headers, names: list[str], ranks: tuple[int, ...]) -> None:
    """Raise the same `Disagreement` on every rank if the ranks are not in the same synchronization."""
    heads = headers.heads
    active = [rank for rank, head in enumerate(heads) if not head.flags & (Flag.SHADOW | Flag.ABORTED)]
    for rank in active:
        head, first = heads[rank], heads[active[0]]
        if head.step != first.step:
            raise Disagreement(
                f"rank {ranks[rank]} is in synchronization {head.step} and rank {ranks[active[0]]} in {first.step}: "
                "they did not call backward equally often; every rank must synchronize in every step "
                "(for uneven inputs use `with sync.join():`)"
            )
        if head.layout_hash != first.layout_hash:
            raise Disagreement(
                f"rank {ranks[rank]} and rank {ranks[active[0]]} packed their gradients differently in synchronization "
                f"{head.step}; detach and attach again on every rank, or resume all from the same checkpoint"
            )
        uneven = head.backwards != first.backwards and not (head.flags | first.flags) & Flag.WEIGHTED
        if uneven and head.micro_batches == first.micro_batches:
            raise Disagreement(
                f"rank {ranks[rank]} ran {head.backwards} backward calls since the last synchronization but rank "
                f"{ranks[active[0]]} ran {first.backwards}: enter no_sync() on the same micro-batches of every rank, "
                "or say how much each counts with set_batch_weight()"
            )
    _check_num_steps({ranks[rank]: heads[rank].num_steps for rank in active if heads[rank].num_steps >= 0})
    _check_trainable(headers, names, ranks)


def _check_num_steps(counts: dict[int, int]) -> None:
    """Raise where one rank ran two backwards in a step, or left out a step that others took."""
    if len(set(counts.values())) < 2:
        return
    most = max(counts.values())
    often = [rank for rank, count in counts.items() if count == most]
    rarely = [rank for rank, count in counts.items() if count < most]
    least = min(counts.values())
    raise Disagreement(
        f"optimizer.step() ran {_times(most)} since the last synchronization on {listed(often)}, but "
        f"{'not' if not least else f'only {_times(least)}'} on {listed(rarely)}: call backward() and step() equally "
        "often on every rank (all backwards of a step but the last under sync.no_sync()), and leave no step() out "
        "after an average that the others apply; for uneven inputs use `with sync.join():`"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _check_trainable(headers: Headers, names: list[str], ranks: tuple[int, ...]) -> None:
    if headers.same_marks:
        return
    for index, name in enumerate(names):
        trainable = [bool(marks[index] & Mark.TRAINABLE) for marks in headers.marks]
        if len(set(trainable)) > 1:
            on = listed([ranks[r] for r, flag in enumerate(trainable) if flag])
            off = listed([ranks[r] for r, flag in enumerate(trainable) if not flag])
            raise Disagreement(
                f'parameter {index} ("{name}") requires a gradient on {on} but not on {off}; '
                "freeze and unfreeze parameters in the same step on every rank"
            )
