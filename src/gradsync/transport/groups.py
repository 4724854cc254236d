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

    NCCL's communicators can be aborted, and are: see [Giving up a communicator] in `nccl_channel`.

Note [Gloo's own time-out]
    It counts the time that passed, in C: after a job was stopped as a whole for longer, gloo gives up on waking, and
    its connections with it. So ours never expires, and every wait is bounded by `Lane.wait`, in time awake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gradsync.algorithms.control_tree import ControlTree, Subgroup
from gradsync.transport.connecting import Attempt, Connect
from gradsync.transport.gloo_channel import GlooChannel, make_gloo
from gradsync.transport.nccl_channel import NcclChannel
from gradsync.transport.sockets import connections

MESSAGES, WITHIN_HOST, ACROSS_HOSTS = "messages", "within_host", "across_hosts"
_NEVER = timedelta(seconds=1e7)  # more overflows its clock; see [Gloo's own time-out]

Channel = GlooChannel | NcclChannel
HOST = torch.device("cpu")

T = TypeVar("T")


@dataclass
class Groups:
    """The subgroups of the control tree, one channel per device type for data, and who we are in them.

    What ranks agree on goes by the tree; a channel among all for control is made when something first asks for it.
    Among the data channels `MESSAGES` is one for sends and receives alone: the lane's thread uses it, while other
    threads issue collectives on the others. `WITHIN_HOST` is one among the ranks of each host, `ACROSS_HOSTS`
    one among the first ranks of all hosts.
    """

    rank: int  # index in the group
    size: int
    ranks: tuple[int, ...]  # the members' global ranks, by index
    tree: ControlTree | None = None  # known after the ranks have met
    subgroups: list[tuple[Subgroup, GlooChannel]] = field(default_factory=list)  # those we are in, from the bottom
    first: GlooChannel | None = None  # for control, among all
    data: dict[str, Channel] = field(default_factory=dict)
    sockets: set[tuple[int, str]] = field(default_factory=set)  # their connections
    link_sockets: set[tuple[int, str]] = field(default_factory=set)  # those among them to first ranks of other hosts
    store: Store | None = None  # where the ranks meet; None: the default group's
    connect: Connect = field(default_factory=lambda: _connect_alone)  # bounded by whoever looks after the peers

    @property
    def control(self) -> GlooChannel:
        """The channel for control among all; every member asks for it at once."""
        if self.first is None:
            self.add_control()
        assert self.first is not None
        return self.first

    def gloo(self, name: str) -> GlooChannel:
        """The channel of this name, which works in host memory."""
        channel = self.data[name]
        assert isinstance(channel, GlooChannel), f"{name} is not on the host"
        return channel

    def connect_by(self, connect: Connect) -> None:
        """Have channels made under the eyes of somebody who looks after the peers."""
        self.connect = connect

    def add_subgroups(self, tree: ControlTree) -> None:
        """Make the channels of the subgroups that we are in; every member must call this."""
        climbed = tree.climb(self.rank)

        def make(attempt: Attempt[list[GlooChannel]]) -> list[GlooChannel]:
            store = self._fresh_store()
            return [self._make_subgroup(subgroup, store, attempt) for subgroup in climbed]  # a lower one first

        channels = self._connect(make)
        self.subgroups = list(zip(climbed, channels, strict=True))
        self.tree = tree
        if self.first is None and tree.is_small:
            [(_, self.first)] = self.subgroups

    def add_control(self) -> None:
        """Make the channel for control; every member must call this."""

        def make(attempt: Attempt[GlooChannel]) -> GlooChannel:
            return make_gloo(PrefixStore("control", self._fresh_store()), self.rank, self.size, _NEVER, attempt)

        self.first = self._connect(make)

    def add_control_at(self, store: Store, limit: timedelta) -> None:
        """Make it in this very part of the store, where torch's own gloo would be; every member must call this."""
        self.first = self._connect(lambda attempt: make_gloo(store, self.rank, self.size, limit, attempt))

    def add_data(self, parent: dist.ProcessGroup, devices: Mapping[str, torch.device]) -> None:
        """Make channels, by name, for tensors on these devices; every member must call this with the same kinds."""
        members = list(range(self.size))
        wanted = [_Wanted(name, members, _served_on(parent, device)) for name, device in devices.items()]
        if wanted:
            self._add(lambda store: store, wanted)

    def add_part(self, parent: dist.ProcessGroup, name: str, members: list[int], device: torch.device) -> None:
        """Make a channel among some, by index; every member of the group calls this, with the part it belongs to.

        Parts of one name do not overlap. Who brings an empty one only keeps count.
        """
        wanted = [_Wanted(name, members, _served_on(parent, device))] if members else []
        self._add(lambda store: PrefixStore(f"part-{members[0]}", store), wanted)

    def close(self) -> None:
        within = {id(channel): channel for channel in (self.first, *self.data.values()) if channel is not None}
        within |= {id(channel): channel for _, channel in self.subgroups}
        for channel in within.values():
            channel.close()

    def abort(self) -> None:
        """End what is under way on GPUs; what is under way on gloo ends with its connections, see `sockets`."""
        for channel in self.on_streams:
            channel.abort()

    def alive(self) -> torch.Tensor | None:
        """The tensor that tells this rank's GPU whether sums may be trusted; None where all is on the host."""
        return next((channel.alive for channel in self.on_streams), None)

    @property
    def on_streams(self) -> list[NcclChannel]:
        """The channels that work on streams of GPUs."""
        return [channel for channel in list(self.data.values()) if isinstance(channel, NcclChannel)]

    @property
    def on_host(self) -> bool:
        """True if every channel works on the host, none on a stream."""
        return all(channel.on_host for channel in (self.first, *self.data.values()) if channel is not None)

    def meeting_place(self) -> Store:
        """The store in which the ranks meet."""
        return self.store or dist.distributed_c10d._get_default_store()

    def _fresh_store(self) -> Store:
        return fresh_prefix(self.meeting_place(), self.ranks, self.ranks[self.rank])

    def _add(self, place: Callable[[Store], Store], wanted: list[_Wanted]) -> None:

        def make(attempt: Attempt[list[Channel]]) -> list[Channel]:
            store = self._fresh_store()
            return [self._make(each, place(store), attempt) for each in wanted]

        channels = self._connect(make)
        self.data.update({each.name: channel for each, channel in zip(wanted, channels, strict=True)})

    def _make_subgroup(self, subgroup: Subgroup, store: Store, attempt: Attempt[list[GlooChannel]]) -> GlooChannel:
        part, before = PrefixStore(f"subgroup-{subgroup.level}-{subgroup.leader}", store), connections()
        channel = make_gloo(part, subgroup.members.index(self.rank), len(subgroup.members), _NEVER, attempt)
        if subgroup.level:
            self.link_sockets.update(connections() - before)
        return channel

    def _make(self, wanted: _Wanted, store: Store, attempt: Attempt[list[Channel]]) -> Channel:
        store, rank, size = PrefixStore(wanted.name, store), wanted.members.index(self.rank), len(wanted.members)
        if wanted.device.type == "cpu":
            return make_gloo(store, rank, size, _NEVER, attempt)
        channel = NcclChannel(store, rank, size, self._connect)
        channel.open(wanted.device, attempt)
        return channel

    def _connect(self, make: Callable[[Attempt[T]], T], what: str = "the making of connections") -> T:
        """Make something in a thread, see `connecting`, and know the connections that came with it."""
        before = connections()
        made = self.connect(make, what)
        self.sockets.update(connections() - before)
        return made


class _Wanted(NamedTuple):
    """A channel that is to be made."""

    name: str
    members: list[int]  # by index in the group
    device: torch.device  # where its tensors are, for the backend


def group_of(parent: dist.ProcessGroup) -> Groups:
    """The members of `parent`, before any channel is made."""
    ranks = tuple(dist.get_process_group_ranks(parent))
    return Groups(dist.get_rank(parent), len(ranks), ranks)


def _connect_alone(make: Callable[[Attempt[Any]], Any], what: str) -> Any:
    attempt = Attempt(make, what)
    attempt.start()
    attempt.settle()
    return attempt.result()


def fresh_prefix(store: Store, ranks: Sequence[int], rank: int) -> Store:
    """A part of the store that no group has used; see [Names]."""
    count = store.add(f"{_home(ranks)}/{rank}", 1)
    return PrefixStore(f"{_home(ranks)}/made-{count}", store)


def give_prefix_back(store: Store, ranks: Sequence[int], rank: int) -> None:
    """Take back an attempt that the other ranks did not count."""
    store.add(f"{_home(ranks)}/{rank}", -1)


def _home(ranks: Sequence[int]) -> str:
    return f"gradsync/groups/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]}"


def _served_on(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device on which a channel of our own works: the host, if `group` uses gloo for such tensors."""
    if is_on_host(group, device.type):
        return HOST
    return torch.device(device.type, torch.cuda.current_device()) if device.index is None else device


def _backend_for(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that `group` uses for tensors of this kind."""
    if device_type == "cpu":
        return "gloo"
    if device_type not in {device.type for device in group._device_types}:
        raise ValueError(f"this process group has no backend for {device_type} tensors; move the tensor, or add one")
    name = group._get_backend(torch.device(device_type)).name().lower()
    if name not in ("gloo", "nccl"):
        raise ValueError(f"gradsync speaks gloo and nccl, but this group uses {name} for {device_type} tensors")
    return name


def is_on_host(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether collectives of such tensors block the host (gloo) instead of running on a stream (nccl)."""
    return _backend_for(group, device_type) == "gloo"


def group_timeout(group: dist.ProcessGroup) -> float:
    """The seconds after which `group` itself gives up."""
    kinds = group._device_types
    options = group._get_backend(kinds[0]).options
    return options._timeout.total_seconds()
