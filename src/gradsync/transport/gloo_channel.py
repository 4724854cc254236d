"""A channel over gloo, torch's backend for host memory."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroupGloo,
    Store,
    Work,
)

from gradsync.transport.connecting import Attempt, PolledStore

# What was posted on channels that nobody closed, by backend: these live until the process ends, see [Groups outlive the
# interpreter] in `groups`.
_posted: dict[int, list[object]] = {}


class GlooChannel:
    """A gloo group of some members: the collectives and messages we need, each started at once."""

    on_host: Literal[True] = True  # waiting blocks the host, not a stream

    def __init__(self, backend: Any, keeps: object = None) -> None:
        self._backend = backend
        self._keeps = keeps  # what the backend needs as long as it lives
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))

    @property
    def backend(self) -> Any:
        """torch's own object."""
        return self._backend

    def sum(self, tensor: torch.Tensor) -> Work:
        """Add up `tensor` over the ranks, in place."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        options = AllreduceOptions()
        options.asyncOp = True
        return self._backend.allreduce([real], options)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Make `tensor` that of the member with index `source`, in place."""
        options = BroadcastOptions()
        options.rootRank = source
        options.asyncOp = True
        return self._backend.broadcast([tensor], options)

    def gather(self, rows: torch.Tensor, row: torch.Tensor) -> Work:
        """Fill `rows` with every member's `row`, by index."""
        options = AllgatherOptions()
        options.asyncOp = True
        return self._backend.allgather([rows.unbind()], [row], options)

    def collect(self, rows: torch.Tensor | None, row: torch.Tensor) -> Work:
        """Fill the first member's `rows` with every member's `row`; the others bring no rows."""
        options = GatherOptions()
        options.rootRank = 0
        return self._backend.gather([] if rows is None else [rows.unbind()], [row], options)

    def trade(self, rows: torch.Tensor, mine: torch.Tensor) -> Work:
        """Give each member its equal part of `mine`, in order; fill `rows` with what each gives to us, by index."""
        options = AllToAllOptions()
        options.asyncOp = True
        return self._backend.alltoall_base(rows.view(-1), mine, [], [], options)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Start sending `tensor` to the member with index `dst`."""
        return self._backend.send([tensor], dst, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """Fill `tensor` with what the member with index `src` sends; messages of one pair and tag keep their order."""
        return self._backend.recv([tensor], src, tag)

    def recv_any(self, tensor: torch.Tensor, tag: int) -> Work:
        """Fill `tensor` with what any member sends under this tag. The work knows its source."""
        return self._backend.recv_anysource([tensor], tag)

    def keep(self, posted: object) -> None:
        """Have what holds sends and receives of this channel live as long as its connections.

        Gloo's thread tries again and again, without a pause, to read a message for which it finds no buffer any more.
        """
        _posted.setdefault(id(self._backend), []).append(posted)

    def close(self) -> None:
        """Let go. Only when nothing is under way: see Note [Groups outlive the interpreter] in `groups`."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._backend))
        _posted.pop(id(self._backend), None)
        self._backend = None


def make_gloo(store: Store, rank: int, size: int, limit: timedelta, attempt: Attempt[Any]) -> GlooChannel:
    """A gloo group, in the thread of an attempt."""
    polled = PolledStore(store, attempt)
    with attempt.constructing(size):
        return GlooChannel(ProcessGroupGloo(polled, rank, size, limit), keeps=polled)
