"""What torch asks for, as operations of the team: all-reduce, reduce-scatter, all-gather of CPU tensors.

all_reduce        each adds up all of it                              SMALL, STAGED
reduce_scatter    each adds up the part that is to be its own         SHED
all_gather        each copies what the others bring, of any dtype     SHARE
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradsync.kernels.library import CODES, Op
from gradsync.transport.team import Pointers, Team

ReduceOp = Any  # torch's, whose fields its stubs do not declare

_ADDS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _nothing() -> None: ...


class Call(NamedTuple):
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
    """Like gloo an all-reduce adds up `numel` elements from where the tensor begins, whatever its strides."""
    return op.op in _ADDS and _in_memory(tensors) and all(tensor.dtype in CODES for tensor in tensors)


def scatterable(parts: Parts, output: torch.Tensor, op: ReduceOp, size: int) -> bool:
    """Integers have no mean here."""
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


def all_reduce(team: Team, tensor: torch.Tensor, op: ReduceOp) -> Call:
    card = _card("", tensor.numel(), tensor.dtype, op.op)
    return Call("all_reduce", team.sum_op(tensor, card, _scale(team, op), in_place=False), tensor, tensor.nbytes)


def reduce_scatter(team: Team, parts: Parts, output: torch.Tensor, op: ReduceOp) -> Call:
    card = _card("reduce_scatter of ", output.numel(), output.dtype, op.op)
    inputs = [each.contiguous() for each in ([parts] if isinstance(parts, torch.Tensor) else parts)]
    [flat], after = _room_for([output])
    pointers = _pointers(inputs, team.size)
    operation = team.shed_op(flat, pointers, card, _scale(team, op))
    return Call("reduce_scatter", operation, (flat, inputs, pointers), team.size * flat.nbytes, after)


def all_gather(team: Team, parts: Parts, mine: torch.Tensor) -> Call:
    card = _card("all_gather of ", mine.numel(), mine.dtype, None)
    own = mine.contiguous()
    flats, after = _room_for([parts] if isinstance(parts, torch.Tensor) else parts)
    pointers = _pointers(flats, team.size)
    return Call("all_gather", team.share_op(own, pointers, card), (own, flats, pointers), own.nbytes, after)


def _room_for(outputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Where the results can be written in one go, and what brings them to their places."""
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
    return 1.0 / team.size if op.op == dist.ReduceOp.AVG else 1.0


@lru_cache(maxsize=1024)
def _card(what: str, numel: int, dtype: torch.dtype, kind: object) -> bytes:
    """What ranks compare before they touch anything."""
    adds = "" if kind is None else f" {str(kind).rpartition('.')[2]}"
    return f"{what}{numel} {str(dtype).removeprefix('torch.')}{adds}".encode()
