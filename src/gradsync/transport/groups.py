"""Process groups of our own, so that nothing we send can meet what the user sends.

Two threads on one gloo group mix up collectives of equal size without an error; so every GradSync makes
its own groups and never issues on the user's.

Note [Names]
    `torch.distributed.new_group` names a group by how many groups this process knows: after one was
    destroyed a name comes back, its stale keys are still in the store, and ranks that belong to unequally
    many groups never agree. So the backends are built here directly, each under a prefix of the store that
    was never used before: the how-manieth attachment of these ranks it is, counted in the store itself.

Note [Groups outlive the interpreter]
    Gloo cannot abort a collective: the destructor of a group with one under way waits for the peer, up to
    the group's timeout. A rank that raises in the middle of a step would then hang at interpreter exit
    while the others wait for it. So each backend carries one reference that is given back only by
    `Groups.close()`, after everything under way has ended; without it the process just exits. What is
    still under way then is ended by cutting our own connections: see `wires`.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)

from gradsync.errors import SyncTimeout, listed, place
from gradsync.transport.wires import connections

MESSAGES, HOUSE, BRIDGE = "messages", "house", "bridge"
_POLL_S = 0.01


class Channel:
    """One backend among the members of a group: the collectives and messages we need, each started at once."""

    def __init__(self, backend: Any, on_host: bool) -> None:
        self._backend = backend
        self.on_host = on_host  # waiting blocks the host (gloo), or a stream (nccl)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))

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
        return self._backend.allgather([list(rows)], [row], options)

    def trade(self, rows: torch.Tensor, mine: torch.Tensor) -> Work:
        """Give each member its equal part of `mine`, in order; fill `rows` with what each gives to us, by index."""
        options = AllToAllOptions()
        options.asyncOp = True
        return self._backend.alltoall_base(rows.view(-1), mine, [], [], options)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Start sending `tensor` to the member with index `dst`; inside a `batch`, what it returns is no work."""
        return self._backend.send([tensor], dst, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """Fill `tensor` with what the member with index `src` sends; messages of one pair and tag keep their order."""
        return self._backend.recv([tensor], src, tag)

    def recv_any(self, tensor: torch.Tensor, tag: int) -> Work:
        """Fill `tensor` with what any member sends under this tag; only for gloo. The work knows its source."""
        return self._backend.recv_anysource([tensor], tag)

    def batch(self, issue: Callable[[], None]) -> Work:
        """Start at once the sends and receives that `issue` issues, at least one; only for nccl, which needs it.

        Outside a batch two ranks that send to each other on one stream wait for each other forever. Tags mean
        nothing to nccl: it matches the messages of a pair in their order. The first batch of a channel makes its
        communicator, so every member must issue one, or some collective, before any can complete.

        Run on one GPU with messages to itself, never with several: none were at hand.
        """
        self._backend._start_coalescing()
        issue()
        return self._backend._end_coalescing()

    def close(self) -> None:
        """Let go. Only when nothing is under way: see [Groups outlive the interpreter]."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._backend))
        self._backend = None


class Groups(NamedTuple):
    """One gloo channel for control, one channel per device type for data, and who we are in them.

    Among the data channels `MESSAGES` is one for sends and receives alone: the lane's thread uses it, while
    other threads issue collectives on the others. `HOUSE` is one among the ranks of each host, `BRIDGE` one among
    the first ranks of all hosts.
    """

    rank: int  # index in the group
    size: int
    ranks: tuple[int, ...]  # the members' global ranks, by index
    control: Channel
    data: dict[str, Channel]
    wires: set[tuple[int, str]]  # their connections
    store: Store | None = None  # where ranks of other hosts leave word; None: the default group's

    def add_data(self, parent: dist.ProcessGroup, device_types: list[str], timeout: float) -> None:
        """Make the channels for tensors of these kinds; every member must call this with the same ones."""
        backends = {kind: _backend_for(parent, kind) for kind in device_types}
        before, store = connections(), _fresh_prefix(list(self.ranks))
        for kind, backend in backends.items():
            self.data[kind] = _make(store, kind, backend, self.rank, self.size, timeout)
        self.wires.update(connections() - before)

    def add_part(
        self, parent: dist.ProcessGroup, name: str, members: list[int], device_type: str, timeout: float
    ) -> None:
        """Make a channel among some, by index; every member of the group calls this, with the part it belongs to.

        Parts of one name do not overlap. Who brings an empty one only keeps count.
        """
        backend = _backend_for(parent, device_type)
        before, store = connections(), _fresh_prefix(list(self.ranks))
        if members:
            part = PrefixStore(f"part-{members[0]}", store)
            self.data[name] = _make(part, name, backend, members.index(self.rank), len(members), timeout)
        self.wires.update(connections() - before)

    def close(self) -> None:
        for channel in (self.control, *self.data.values()):
            channel.close()


def make_groups(parent: dist.ProcessGroup, patience: float, timeout: float) -> Groups:
    """A control channel among the members of `parent`; every member must call this, others must not.

    For `patience` seconds the others may take to come; `timeout` is the backends' own.
    """
    ranks = dist.get_process_group_ranks(parent)
    rank, size = dist.get_rank(parent), len(ranks)
    store = _fresh_prefix(ranks)
    try:
        _gather_in(store, ranks, patience)
    except BaseException:
        _give_prefix_back(ranks)  # the others did not count this attempt
        raise
    before = connections()
    control = _make(store, "control", "gloo", rank, size, timeout)
    return Groups(rank, size, tuple(ranks), control, {}, set(connections() - before))


def _make(store: Store, name: str, backend: str, rank: int, size: int, timeout: float) -> Channel:
    prefix, limit = PrefixStore(name, store), timedelta(seconds=timeout)
    if backend == "gloo":
        return Channel(ProcessGroupGloo(prefix, rank, size, limit), on_host=True)
    return Channel(_nccl(prefix, rank, size, limit), on_host=False)


def _fresh_prefix(ranks: list[int]) -> Store:
    """A part of the store that no group has used; see [Names]."""
    store = dist.distributed_c10d._get_default_store()
    count = store.add(f"{_home(ranks)}/{dist.get_rank()}", 1)
    return PrefixStore(f"{_home(ranks)}/made-{count}", store)


def _give_prefix_back(ranks: list[int]) -> None:
    dist.distributed_c10d._get_default_store().add(f"{_home(ranks)}/{dist.get_rank()}", -1)


def _home(ranks: list[int]) -> str:
    return f"gradsync/groups/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"


def _gather_in(store: Store, ranks: list[int], patience: float) -> None:
    """Wait until all are here. A backend that connects waits too, but unheard by Ctrl-C, and names nobody."""
    store.set(f"here-{dist.get_rank()}", "1")
    deadline = time.monotonic() + patience
    missing = [rank for rank in ranks if rank != dist.get_rank()]
    while missing := [rank for rank in missing if not store.check([f"here-{rank}"])]:
        if time.monotonic() >= deadline:
            where = place(dist.get_rank(), dist.get_world_size())
            raise SyncTimeout(
                f"{where} waited {patience:g} s in attach, but {listed(missing)} did not come; every rank of the group "
                "must call it, equally often and in the same order",
                missing,
            )
        time.sleep(_POLL_S)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only in builds with NCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(store, rank, size, options)


def _backend_for(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that `group` uses for tensors of this kind."""
    if device_type in ("cpu", MESSAGES):
        return "gloo"
    if device_type not in {device.type for device in group._device_types}:
        raise ValueError(f"this process group has no backend for {device_type} tensors; move the tensor, or add one")
    name = group._get_backend(torch.device(device_type)).name().lower()
    if name not in ("gloo", "nccl"):
        raise ValueError(f"gradsync speaks gloo and nccl, but this group uses {name} for {device_type} tensors")
    return name


def is_on_host(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether collectives of such tensors block the host (gloo), or run on a stream (nccl)."""
    return _backend_for(group, device_type) == "gloo"


def group_timeout(group: dist.ProcessGroup) -> float:
    """The seconds after which `group` itself gives up."""
    kinds = group._device_types
    options = group._get_backend(kinds[0]).options
    return options._timeout.total_seconds()
