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
    still under way then is ended by cutting our own connections: see `sockets`.

Note [Gloo's own time-out]
    It counts the time that passed, in C: after a job was stopped as a whole for longer, gloo gives up on waking, and
    its connections with it. So ours never expires, and every wait is bounded by `Lane.wait`, in time awake.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

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

from gradsync.transport.connecting import Attempt, PolledStore
from gradsync.transport.sockets import connections

MESSAGES, WITHIN_HOST, ACROSS_HOSTS = "messages", "within_host", "across_hosts"
_NEVER = timedelta(seconds=1e7)  # more overflows its clock; see [Gloo's own time-out]

T = TypeVar("T")


class Connect(Protocol):
    """Runs `make(attempt)` in a thread and waits for it; `what` is how an error names it."""

    def __call__(self, make: Callable[[Attempt[T]], T], what: str) -> T: ...


class Channel:
    """One backend among the members of a group: the collectives and messages we need, each started at once."""

    def __init__(self, backend: Any, on_host: bool, keeps: object = None) -> None:
        self._backend = backend
        self._keeps = keeps  # what the backend needs as long as it lives
        self.on_host = on_host  # waiting blocks the host (gloo), or a stream (nccl)
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


@dataclass
class Groups:
    """One gloo channel for control, one channel per device type for data, and who we are in them.

    Among the data channels `MESSAGES` is one for sends and receives alone: the lane's thread uses it, while
    other threads issue collectives on the others. `WITHIN_HOST` is one among the ranks of each host, `ACROSS_HOSTS`
    one among the first ranks of all hosts.
    """

    rank: int  # index in the group
    size: int
    ranks: tuple[int, ...]  # the members' global ranks, by index
    first: Channel | None = None  # for control; made after the ranks have met
    data: dict[str, Channel] = field(default_factory=dict)
    wires: set[tuple[int, str]] = field(default_factory=set)  # their connections
    store: Store | None = None  # where the ranks meet; None: the default group's
    connect: Connect = field(default_factory=lambda: _connect_alone)  # bounded by whoever looks after the peers

    @property
    def control(self) -> Channel:
        assert self.first is not None, "the ranks have not met"
        return self.first

    def connect_by(self, connect: Connect) -> None:
        """Have channels made under the eyes of somebody who looks after the peers."""
        self.connect = connect

    def add_control(self) -> None:
        """Make the channel for control; every member must call this."""
        [self.first] = self._add(lambda store: [_Wanted(store, "control", "gloo", self.rank, self.size)], 0.0)

    def add_control_at(self, store: Store, limit: timedelta) -> None:
        """Make it in this very part of the store, where torch's own gloo would be; every member must call this."""
        self.first = self._connect(lambda attempt: make_gloo(store, self.rank, self.size, limit, attempt))

    def add_data(self, parent: dist.ProcessGroup, device_types: list[str], timeout: float) -> None:
        """Make the channels for tensors of these kinds; every member must call this with the same ones.

        `timeout` in seconds is nccl's own; gloo's never expires.
        """
        backends = {kind: _backend_for(parent, kind) for kind in device_types}
        if backends:
            channels = self._add(
                lambda store: [_Wanted(store, *item, self.rank, self.size) for item in backends.items()], timeout
            )
            self.data.update(zip(backends, channels, strict=True))

    def add_part(
        self, parent: dist.ProcessGroup, name: str, members: list[int], device_type: str, timeout: float
    ) -> None:
        """Make a channel among some, by index; every member of the group calls this, with the part it belongs to.

        Parts of one name do not overlap. Who brings an empty one only keeps count.
        """
        backend = _backend_for(parent, device_type)

        def wanted(store: Store) -> list[_Wanted]:
            if not members:
                return []
            part = PrefixStore(f"part-{members[0]}", store)
            return [_Wanted(part, name, backend, members.index(self.rank), len(members))]

        for channel in self._add(wanted, timeout):
            self.data[name] = channel

    def close(self) -> None:
        for channel in (self.first, *self.data.values()):
            if channel is not None:
                channel.close()

    @property
    def on_host(self) -> bool:
        """Whether no channel is a stream's affair."""
        return all(channel.on_host for channel in (self.first, *self.data.values()) if channel is not None)

    def meeting_place(self) -> Store:
        """The store in which the ranks meet."""
        return self.store or dist.distributed_c10d._get_default_store()

    def _add(self, wanted: Callable[[Store], list[_Wanted]], timeout: float) -> list[Channel]:

        def make(attempt: Attempt[list[Channel]]) -> list[Channel]:
            store = fresh_prefix(self.meeting_place(), self.ranks, self.ranks[self.rank])
            return [_make(each, attempt, timeout) for each in wanted(store)]

        return self._connect(make)

    def _connect(self, make: Callable[[Attempt[T]], T]) -> T:
        """Make something in a thread, see `connecting`, and know the connections that came with it."""
        before = connections()
        made = self.connect(make, "the making of connections")
        self.wires.update(connections() - before)
        return made


class _Wanted(NamedTuple):
    """A backend that is to be made."""

    store: Store
    name: str
    backend: str
    rank: int
    size: int


def make_groups(parent: dist.ProcessGroup) -> Groups:
    """A control channel among the members of `parent`; every member must call this, others must not.

    Nobody looks after the peers: where one may be missing, `lane.open_lane` does.
    """
    groups = group_of(parent)
    groups.add_control()
    return groups


def group_of(parent: dist.ProcessGroup) -> Groups:
    """The members of `parent`, before any channel is made."""
    ranks = tuple(dist.get_process_group_ranks(parent))
    return Groups(dist.get_rank(parent), len(ranks), ranks)


def _connect_alone(make: Callable[[Attempt[Any]], Any], what: str) -> Any:
    attempt = Attempt(make, what)
    attempt.start()
    attempt.settle()
    return attempt.result()


def _make(wanted: _Wanted, attempt: Attempt[Any], timeout: float) -> Channel:
    store, name, backend, rank, size = wanted
    if backend == "gloo":
        return make_gloo(PrefixStore(name, store), rank, size, _NEVER, attempt)
    return Channel(_nccl(PrefixStore(name, store), rank, size, timedelta(seconds=timeout)), on_host=False)


def make_gloo(store: Store, rank: int, size: int, limit: timedelta, attempt: Attempt[Any]) -> Channel:
    """A gloo group, in the thread of an attempt."""
    polled = PolledStore(store, attempt)
    with attempt.constructing(size):
        return Channel(ProcessGroupGloo(polled, rank, size, limit), on_host=True, keeps=polled)


def fresh_prefix(store: Store, ranks: Sequence[int], rank: int) -> Store:
    """A part of the store that no group has used; see [Names]."""
    count = store.add(f"{_home(ranks)}/{rank}", 1)
    return PrefixStore(f"{_home(ranks)}/made-{count}", store)


def give_prefix_back(store: Store, ranks: Sequence[int], rank: int) -> None:
    """Take back an attempt that the other ranks did not count."""
    store.add(f"{_home(ranks)}/{rank}", -1)


def _home(ranks: Sequence[int]) -> str:
    return f"gradsync/groups/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]}"


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
