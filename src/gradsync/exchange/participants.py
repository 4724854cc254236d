"""The ranks that take part in a round of compressed data, and their way: everybody, or one rank of each host.

    AllRanks    sums ride the plan's algorithm; on one host payloads are gathered in shared memory
    Leaders     the first rank of each host, over a channel of their own: what `across_hosts` needs

Rounds work on tensors of host memory (gloo), or of the GPU (NCCL). `WithinHosts` adds up inside each host what is
compressed only across hosts.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist

from gradsync.errors import NotEnoughMemory
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import Form
from gradsync.exchange.pinned import PinnedRoute
from gradsync.exchange.routes import Bounds, SharedRoute, share_blocks
from gradsync.kernels.library import OpKind
from gradsync.transport.groups import ACROSS_HOSTS, WITHIN_HOST, Channel
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Pending, pending_of
from gradsync.transport.shared_memory import Team, label_of


class Members(Protocol):
    """The ranks that take part, and memory that suits their rounds; every rank of the group asks for it at once."""

    size: int
    rank: int  # this one's index among them
    in_memory: bool  # whether gathered data never leaves the host

    def for_sums(self, form: Form) -> torch.Tensor:
        """Zeros for `sum`."""

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """Rows of bytes for `gather` and `trade`."""


class Participants(Members, Protocol):
    """The ranks of a round."""

    def sum(self, flat: torch.Tensor, bucket: int) -> Pending:
        """Start adding up `flat`, in place."""

    def sum_share(self, form: Form) -> float:
        """Return how many of its bytes this rank sends over a network, as a factor."""

    def sum_way(self, form: Form) -> str:
        """The algorithm by which such a tensor is added up."""

    def gather(self, rows: torch.Tensor, bucket: int) -> Pending:
        """Start filling `rows`, of which each rank has filled its own."""

    def trade(self, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> Pending:
        """Start giving each rank its equal part of `mine`; `rows` are the parts that they give to us."""


class AllRanks:
    """All ranks of the group."""

    def __init__(self, lane: Lane, exact: ExactSum) -> None:
        self.size, self.rank = lane.groups.size, lane.groups.rank
        self.in_memory = lane.one_host
        self._lane = lane
        self._exact = exact

    def sum(self, flat: torch.Tensor, bucket: int) -> Pending:
        return self._exact.launch(flat, bucket)

    def sum_share(self, form: Form) -> float:
        return self._exact.route(form).sent_share

    def sum_way(self, form: Form) -> str:
        return self._exact.route(form).name

    def gather(self, rows: torch.Tensor, bucket: int) -> Pending:
        team = self._lane.team
        if self.in_memory and team is not None and rows.device.type == "cpu" and team.locate(rows) is not None:
            step = self._lane.current_step
            return self._lane.send(lambda: _gather_in_memory(team, rows, step, bucket), *_words(rows, bucket))
        return _gather(self._lane, self._lane.groups.data[rows.device.type], rows, self.rank, bucket)

    def trade(self, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> Pending:
        return _trade(self._lane, self._lane.groups.data[rows.device.type], rows, mine, bucket)

    def for_sums(self, form: Form) -> torch.Tensor:
        return self._exact.allocate([form])[0]

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        team, nbytes = self._lane.team, shape[0] * shape[1]
        if self.in_memory and team is not None and device.type == "cpu":
            try:
                return team.allocate(nbytes)[:nbytes].view(shape)
            except NotEnoughMemory:
                pass  # every rank comes to it: by the backend then
        return torch.zeros(shape, dtype=torch.uint8, device=device)


class Leaders:
    """The first rank of each host; the others only make the memory with them, and never launch."""

    def __init__(self, lane: Lane, parent: dist.ProcessGroup, device: torch.device) -> None:
        self._firsts = [host[0] for host in lane.hosts]
        self.size, self.in_memory = len(self._firsts), False
        self.rank = self._firsts.index(lane.groups.rank) if lane.groups.rank in self._firsts else -1
        self._lane = lane
        self._parent, self._device = parent, device
        self._open = False

    def open(self) -> None:
        """Make their channel, if it is not there; every rank of the group calls this at once."""
        if not self._open:
            mine = self._firsts if self.rank >= 0 else []
            self._lane.groups.add_part(self._parent, ACROSS_HOSTS, mine, self._device)
            self._open = True

    @property
    def _bridge(self) -> Channel:
        return self._lane.groups.data[ACROSS_HOSTS]

    def sum(self, flat: torch.Tensor, bucket: int) -> Pending:
        issue = self._bridge.sum(flat)
        return self._lane.follow(pending_of(issue, *_words(flat, bucket)))

    def sum_share(self, form: Form) -> float:
        return 2 * (self.size - 1) / self.size if self.rank >= 0 else 0.0

    def sum_way(self, form: Form) -> str:
        return "native"

    def gather(self, rows: torch.Tensor, bucket: int) -> Pending:
        return _gather(self._lane, self._bridge, rows, self.rank, bucket)

    def trade(self, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> Pending:
        return _trade(self._lane, self._bridge, rows, mine, bucket)

    def for_sums(self, form: Form) -> torch.Tensor:
        return torch.zeros(form.numel, dtype=form.dtype, device=form.device)

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)


def _gather(lane: Lane, channel: Channel, rows: torch.Tensor, rank: int, bucket: int) -> Pending:
    # A copy of our row: the backend may not read what it writes.
    work = channel.gather(rows, rows[rank].clone())
    return lane.follow(pending_of(work, *_words(rows, bucket)))


def _trade(lane: Lane, channel: Channel, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> Pending:
    return lane.follow(pending_of(channel.trade(rows, mine), *_words(rows, bucket)))


def _gather_in_memory(team: Team, rows: torch.Tensor, step: int, bucket: int) -> None:
    """Fetch the others' rows, as each rank does, on the lane's thread."""
    share_blocks(team, OpKind.GATHER, rows, _row_bounds(*rows.shape), label_of(rows, step, bucket))


@lru_cache(maxsize=256)
def _row_bounds(num_rows: int, nbytes: int) -> Bounds:
    return (ctypes.c_uint64 * (num_rows + 1))(*(row * nbytes for row in range(num_rows + 1)))


def _words(tensor: torch.Tensor, bucket: int) -> tuple[str, int, int]:
    """Return how a pending is named."""
    return f"bucket {bucket}", tensor.numel() * tensor.element_size(), bucket


class WithinHosts:
    """The ranks of this host: in shared memory where they can, else over a channel of their own."""

    def __init__(self, lane: Lane, parent: dist.ProcessGroup, device: torch.device, on_host: bool) -> None:
        self._lane = lane
        self._members = next(host for host in lane.hosts if lane.groups.rank in host)
        self._parent, self._device = parent, device
        self._routes: dict[str, SharedRoute | PinnedRoute] = {}
        self._open = lane.groups.size == len(lane.hosts)  # there is nobody to speak with
        if on_host and lane.team is not None:
            self._open = True
            self._routes["cpu"] = shared = SharedRoute(lane, lane.team)
            if device.type != "cpu":
                self._routes[device.type] = PinnedRoute(lane, shared, device)

    def open(self) -> None:
        """Make their channel, if they need one and it is not there; every rank of the group calls this at once."""
        if not self._open:
            self._lane.groups.add_part(self._parent, WITHIN_HOST, list(self._members), self._device)
            self._open = True

    def sum(self, flat: torch.Tensor, bucket: int) -> Pending | None:
        """Start adding up `flat` over the ranks of this host, in place; None if there is only one."""
        if len(self._members) == 1:
            return None
        if flat.device.type in self._routes:
            return self._routes[flat.device.type].launch(flat, bucket)
        channel = self._lane.groups.data[WITHIN_HOST]
        return self._lane.follow(pending_of(channel.sum(flat), *_words(flat, bucket)))
