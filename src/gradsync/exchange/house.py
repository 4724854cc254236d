"""Sums inside each host, for what is compressed only across hosts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradsync.exchange.pinned import PinnedRoute
from gradsync.exchange.shared import SharedRoute
from gradsync.transport.groups import HOUSE
from gradsync.transport.lane import Lane
from gradsync.transport.tickets import Collective, Ticket


class House:
    """The ranks of this host: in shared memory where they can, else over a channel of their own."""

    def __init__(
        self, lane: Lane, parent: dist.ProcessGroup, device: torch.device, on_host: bool, timeout: float
    ) -> None:
        """Every rank of the group makes it at once."""
        self._lane = lane
        self._members = next(host for host in lane.hosts if lane.groups.rank in host)
        self._routes: dict[str, SharedRoute | PinnedRoute] = {}
        if on_host and lane.team is not None:
            self._routes["cpu"] = shared = SharedRoute(lane, lane.team)
            if device.type != "cpu":
                self._routes[device.type] = PinnedRoute(lane, shared, device)
        else:
            lane.groups.add_part(parent, HOUSE, list(self._members), device.type, timeout)

    def sum(self, flat: torch.Tensor, bucket: int) -> Ticket | None:
        """Start adding up `flat` over the ranks of this host, in place; None if there is only one."""
        if len(self._members) == 1:
            return None
        if flat.device.type in self._routes:
            return self._routes[flat.device.type].launch(flat, bucket)
        channel = self._lane.groups.data[HOUSE]
        nbytes = flat.numel() * flat.element_size()
        return self._lane.follow(Collective(channel.sum(flat), f"bucket {bucket}", nbytes, bucket, channel.on_host))
