"""The ranks that measure together: a lane of their own, who is where, and what each tells all.

Whatever is decided while measuring (how often, how large, when to stop) is decided by numbers that all ranks have
exchanged, so that all decide alike.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gradsync.cluster import Hosts
from gradsync.errors import GradSyncError
from gradsync.exchange.pinned import travel_device
from gradsync.plan.guard import Guard
from gradsync.transport.groups import ACROSS_HOSTS, HOST, MESSAGES, WITHIN_HOST, group_timeout, is_on_host
from gradsync.transport.lane import open_lane

_PATIENCE_S = 120.0
_NAME_NBYTES = 64
_BOARD_NBYTES = 64


class ProbeGroup:
    """The lane of the ranks that measure together, as one of them sees it."""

    def __init__(self, parent: dist.ProcessGroup, brief: bool) -> None:
        """Every rank of the group calls this at once."""
        timeout = min(group_timeout(parent), _PATIENCE_S)
        self.brief = brief
        self.lane = lane = open_lane(parent, Guard(), timeout)
        lane.open_team(_BOARD_NBYTES)
        self.rank, self.size = lane.groups.rank, lane.groups.size
        self.device = _device(parent)
        self.on_host = is_on_host(parent, self.device.type)
        self.wire = travel_device(self.device, self.on_host)
        firsts = [host[0] for host in lane.hosts]
        lane.groups.add_data(parent, {self.wire.type: self.wire, MESSAGES: HOST})
        lane.groups.add_part(parent, WITHIN_HOST, list(self.host), self.wire)
        lane.groups.add_part(parent, ACROSS_HOSTS, firsts if self.rank in firsts else [], self.wire)
        self._names = [name.rstrip(b"\0").decode(errors="replace") for name in self._tell_names()]

    # Who

    @property
    def hosts(self) -> Hosts:
        return self.lane.hosts

    @property
    def host(self) -> tuple[int, ...]:
        """The ranks of this one's host."""
        return next(host for host in self.hosts if self.rank in host)

    @property
    def full_hosts(self) -> list[tuple[int, ...]]:
        """The hosts with the most ranks: what is measured inside hosts is theirs. None if each has a single rank."""
        most = max(map(len, self.hosts))
        return [host for host in self.hosts if len(host) == most] if most > 1 else []

    def name_of(self, rank: int) -> str:
        """The rank's name: "rank 3 on host b"."""
        return f"rank {self.lane.groups.ranks[rank]} on {self._names[rank]}"

    def name_of_host(self, index: int) -> str:
        """The host's name: "host b (ranks 4-7)"."""
        ranks = [self.lane.groups.ranks[rank] for rank in self.hosts[index]]
        joined = "-" if ranks == list(range(ranks[0], ranks[-1] + 1)) else ", "
        ends = [ranks[0], ranks[-1]] if joined == "-" else ranks
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {joined.join(map(str, ends))}"
        return f"{self._names[self.hosts[index][0]]} ({which})"

    def _tell_names(self) -> list[bytes]:
        name = socket.gethostname().encode()[:_NAME_NBYTES].ljust(_NAME_NBYTES, b"\0")
        return self.lane.exchange(name, "the names of the hosts")

    # Together

    def tell(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """Every rank's numbers, by rank; all must bring equally many. Nobody goes on before everybody came."""
        form = struct.Struct(f"<{len(numbers)}d")
        return [form.unpack(row) for row in self.lane.exchange(form.pack(*numbers), "the exchange of measurements")]

    def tell_one(self, number: float = math.nan) -> list[float]:
        """Every rank's number, by rank."""
        return [row[0] for row in self.tell([number])]

    def meet(self) -> None:
        """Return when every rank has called this."""
        self.tell_one()

    def settle(self) -> None:
        """Wait until what a GPU was told to do is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def open_probe_group(parent: dist.ProcessGroup, brief: bool) -> Iterator[ProbeGroup]:
    """A probe group of the members of `parent`, each with one torch thread meanwhile; all call this at once."""
    threads = torch.get_num_threads()
    group = ProbeGroup(parent, brief)
    torch.set_num_threads(1)
    try:
        yield group
        group.meet()  # nobody leaves while somebody still measures
    except BaseException as error:
        if not isinstance(error, GradSyncError):  # else the lane has said it already
            group.lane.fail()
        group.lane.close(together=False)
        raise
    finally:
        torch.set_num_threads(threads)
    group.lane.close(together=True)


def _device(parent: dist.ProcessGroup) -> torch.device:
    """The device where the ranks of this group compute: a GPU, if it has a backend for them."""
    if torch.cuda.is_available() and "cuda" in {device.type for device in parent._device_types}:
        return torch.device("cuda", torch.cuda.current_device())
    return HOST
