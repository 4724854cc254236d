"""The collectives of torch as operations of the team: all-reduce, reduce-scatter, all-gather of CPU tensors.

    all_reduce        each adds up all of it                              SMALL, STAGED
    reduce_scatter    each adds up the part that is to be its own         SHED
    all_gather        each copies what the others bring, of any dtype     SHARE

A group's operations in shared memory, one after the other in the order in which they were issued.

One that is waited for at once is done by the caller itself, if no other is under way; all others by the team's
worker, a thread of C, beside the computation. Both use one stream of the team, so ranks need not agree on which.

Note [Order]
    What is done in shared memory keeps its order, and so do gloo's collectives. Between the two there is none, as there
    is none between two asynchronous collectives of gloo, which has two threads: whoever uses a result waits for its
    work.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradsync.errors import Disagreement
from gradsync.exchange.means import mean_scale
from gradsync.kernels.library import CODES, Op
from gradsync.transport.lane import Lane
from gradsync.transport.pending import ByCaller, ByWorker, Pending
from gradsync.transport.shared_memory import WORKER, LabelsDiffer, Pointers, Team

ReduceOp = Any  # torch's, whose fields its stubs do not declare

_ADDS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _nothing() -> None: ...


class TeamOperation(NamedTuple):
    """One operation that has not begun."""

    what: str
    op: Op
    keeps: object  # where the team reads and writes
    nbytes: int
    after: Callable[[], None] = _nothing  # when it is done


# Whether shared memory can do it: that depends only on what is equal on all ranks, for all must do the same. So strides
# never matter. What has one part for each rank is a list of tensors, or one tensor, which is cut.

Parts = torch.Tensor | list[torch.Tensor]


def summable(tensors: Sequence[torch.Tensor], op: ReduceOp) -> bool:
    """Return whether we add these up: like gloo, `numel` elements from where a tensor begins, whatever its strides."""
    return op.op in _ADDS and _in_memory(tensors) and all(tensor.dtype in CODES for tensor in tensors)


def scatterable(parts: Parts, output: torch.Tensor, op: ReduceOp, size: int) -> bool:
    """Return whether a reduce-scatter is ours: integers have no mean here."""
    averages = op.op == dist.ReduceOp.AVG
    return gatherable(parts, output, size) and summable([output], op) and (output.is_floating_point() or not averages)


def gatherable(parts: Parts, mine: torch.Tensor, size: int) -> bool:
    tensors = [parts] if isinstance(parts, torch.Tensor) else parts
    if not _in_memory([mine, *tensors]) or any(tensor.dtype != mine.dtype for tensor in tensors):
        return False
    if isinstance(parts, torch.Tensor):
        return parts.numel() == size * mine.numel()
    return len(parts) == size and all(part.numel() == mine.numel() for part in parts)


def _in_memory(tensors: Sequence[torch.Tensor]) -> bool:
    if torch._C._len_torch_dispatch_stack():  # a mode wants to see what torch dispatches
        return False
    # Subclasses may have no memory of their own (FakeTensor, AsyncCollectiveTensor).
    return all(type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout == torch.strided for tensor in tensors)


# The operations


def all_reduce(team: Team, tensor: torch.Tensor, op: ReduceOp) -> TeamOperation:
    signature = _signature("", tensor.numel(), tensor.dtype, op.op)
    return TeamOperation(
        "all_reduce", team.sum_op(tensor, signature, _scale(team, op), in_place=False), tensor, tensor.nbytes
    )


def reduce_scatter(team: Team, parts: Parts, output: torch.Tensor, op: ReduceOp) -> TeamOperation:
    signature = _signature("reduce_scatter of ", output.numel(), output.dtype, op.op)
    inputs = [each.contiguous() for each in ([parts] if isinstance(parts, torch.Tensor) else parts)]
    [flat], after = _room_for([output])
    pointers = _pointers(inputs, team.size)
    operation = team.shed_op(flat, pointers, signature, _scale(team, op))
    return TeamOperation("reduce_scatter", operation, (flat, inputs, pointers), team.size * flat.nbytes, after)


def all_gather(team: Team, parts: Parts, mine: torch.Tensor) -> TeamOperation:
    signature = _signature("all_gather of ", mine.numel(), mine.dtype, None)
    own = mine.contiguous()
    flats, after = _room_for([parts] if isinstance(parts, torch.Tensor) else parts)
    pointers = _pointers(flats, team.size)
    return TeamOperation(
        "all_gather", team.share_op(own, pointers, signature), (own, flats, pointers), own.nbytes, after
    )


def _room_for(outputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Memory in which the results can be written in one go, and what brings them to their places."""
    if all(output.is_contiguous() for output in outputs):
        return list(outputs), _nothing
    flats = [torch.empty(output.shape, dtype=output.dtype, device=output.device) for output in outputs]

    def copy() -> None:
        for output, flat in zip(outputs, flats, strict=True):
            with torch.inference_mode() if output.is_inference() else torch.no_grad():
                output.copy_(flat)

    return flats, copy


def _pointers(tensors: Sequence[torch.Tensor], size: int) -> Pointers:
    """Each rank's part: a tensor for each, or one that is cut into equal parts."""
    if len(tensors) == 1:
        first, nbytes = tensors[0].data_ptr(), tensors[0].nbytes // size
        return (ctypes.c_void_p * size)(*(first + rank * nbytes for rank in range(size)))
    return (ctypes.c_void_p * size)(*(tensor.data_ptr() for tensor in tensors))


def _scale(team: Team, op: ReduceOp) -> float:
    return mean_scale(team.size, "mean" if op.op == dist.ReduceOp.AVG else "sum")


@lru_cache(maxsize=1024)
def _signature(what: str, numel: int, dtype: torch.dtype, kind: object) -> bytes:
    """Return what ranks compare before they touch anything."""
    adds = "" if kind is None else f" {str(kind).rpartition('.')[2]}"
    return f"{what}{numel} {str(dtype).removeprefix('torch.')}{adds}".encode()


class TeamQueue:
    """The queue of what one rank of a group does with the others, all of one host."""

    def __init__(self, lane: Lane, team: Team) -> None:
        self.lane = lane
        self.team = team
        self._issue_lock = threading.Lock()  # threads issue one after the other
        self._peer_lock = threading.Lock()  # one thread at a time looks after the peers

    def now(self, operations: Sequence[TeamOperation], timeout: float | None) -> None:
        """Do these, in place; done when it returns."""
        with self._issue_lock:
            idle = self.lane.idle
            if idle:
                self._do(operations, timeout)
            else:
                in_flight = [self._submit(operation) for operation in operations]
        if not idle:
            self.settle(operations, in_flight, timeout)

    def start(self, operations: Sequence[TeamOperation]) -> list[Pending]:
        """Begin these; `settle` waits for what is returned."""
        with self._issue_lock:
            return [self._submit(operation) for operation in operations]

    def settle(self, operations: Sequence[TeamOperation], in_flight: Sequence[Pending], timeout: float | None) -> None:
        """Wait until all have ended, even if ranks disagree over one; then raise what went wrong."""
        disagreement: Disagreement | None = None
        for operation, pending in zip(operations, in_flight, strict=True):
            try:
                self._settle(operation, pending, timeout)
            except Disagreement as error:
                disagreement = disagreement or error
        if disagreement is not None:
            raise disagreement

    def _settle(self, operation: TeamOperation, pending: Pending, timeout: float | None) -> None:
        try:
            if pending.landed(pending.patience_s):
                self.lane.wait(pending)
            else:
                with self._peer_lock:
                    self.lane.wait(pending, timeout)
        except LabelsDiffer as error:
            pending.refuse()
            raise self._disagreement(operation.what, error.labels) from None
        except BaseException as error:
            self.lane.give_up(error)  # Ctrl-C, say: nobody may go on from the middle of it
            raise
        operation.after()

    def _do(self, operations: Sequence[TeamOperation], timeout: float | None) -> None:
        """Run these here, one after the other: each begins when the one before it has ended."""
        for operation in operations:
            self.lane.session.next_call(operation.what, "one")
        self.settle(
            operations, [ByCaller(self.team, WORKER, operation.op, operation.what) for operation in operations], timeout
        )

    def _submit(self, operation: TeamOperation) -> Pending:
        self.lane.session.next_call(operation.what, "one")
        _ = self.lane.idle  # looks at all that are under way, so that the lane lets go of those nobody waits for
        return self.lane.follow(
            ByWorker(self.team, operation.op, operation.keeps, operation.what, operation.nbytes, -1)
        )

    def _disagreement(self, what: str, labels: list[str]) -> Disagreement:
        ranks = self.lane.global_ranks(list(self.team.members))
        said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, labels, strict=True))
        return Disagreement(f"{what} was called with different tensors ({said}); every rank must bring the same")
