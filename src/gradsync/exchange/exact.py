"""The exact round trip of a flat tensor: which way it takes, by plan, place and size.

one host                          in shared memory
several hosts                     the cheapest by price; hierarchical uses shared memory inside each host
GPU tensors on gloo               the same, through pinned memory
GPU tensors on NCCL               the backend's own all-reduce
no C library, not enough memory   the backend's own all-reduce, and a warning that says why
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist

from gradsync.allreduce.choice import MEMORY, Algorithm, cheapest
from gradsync.allreduce.native import Native
from gradsync.allreduce.shared_memory import SharedMemory
from gradsync.exchange.levels import LevelRoute
from gradsync.exchange.memory import Form, carve, zeros
from gradsync.exchange.native import NativeRoute
from gradsync.exchange.shared import SharedRoute
from gradsync.exchange.ways import open_ways
from gradsync.kernels.library import CODES
from gradsync.transport.lane import Lane
from gradsync.transport.tickets import Ticket


class Route(Protocol):
    """A way for a flat tensor to be summed over the ranks."""

    @property
    def name(self) -> str: ...

    @property
    def wire_share(self) -> float:
        """How many of a tensor's bytes this rank sends over a network, as a factor."""

    def launch(self, flat: torch.Tensor, bucket: int) -> Ticket:
        """Start; `flat` holds the sum when the ticket is settled."""


class Exact:
    """Sums flat tensors over the ranks of a group."""

    def __init__(
        self,
        lane: Lane,
        parent: dist.ProcessGroup,
        algorithm: Algorithm | None,
        devices: Iterable[torch.device],
        timeout: float,
    ) -> None:
        """Make the channels and ways for tensors on these devices; every rank of the group calls this at once."""
        kinds = {device.type: device for device in sorted(devices, key=str)}
        missing = [kind for kind in kinds if kind not in lane.groups.data]
        lane.groups.add_data(parent, missing, timeout)
        self._lane = lane
        self._algorithm = algorithm
        self._native = NativeRoute(lane)
        self._ways = open_ways(lane, parent, algorithm, kinds, timeout)
        self._choose = lru_cache(maxsize=1024)(self._chosen)

    def launch(self, flat: torch.Tensor, bucket: int = -1) -> Ticket:
        """Start summing `flat` over the ranks, in place."""
        real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        return self.route(Form(real.numel(), real.dtype, real.device)).launch(real, bucket)

    def route(self, form: Form) -> Route:
        """The way that such a tensor takes."""
        if form.dtype not in CODES and not form.dtype.is_complex:
            return self._native
        algorithm = self._choose(form.numel * form.dtype.itemsize) if self._algorithm is None else self._algorithm
        return self._ways.of(form.device.type, algorithm) or self._native  # type: ignore[return-value]

    def _chosen(self, nbytes: int) -> Algorithm:
        if self._ways.cluster is not None:
            return cheapest(nbytes, self._ways.cluster, MEMORY if self._lane.team is not None else None)
        return SharedMemory() if self._lane.one_host else Native()

    def allocate(self, forms: list[Form]) -> list[torch.Tensor]:
        """Zeros of these forms, in the team's memory where that is of use; every rank calls this at once."""
        team = self._lane.team
        shared = [team is not None and self._is_shared(form) for form in forms]
        return zeros(forms) if team is None or not any(shared) else carve(team, forms, shared)

    def _is_shared(self, form: Form) -> bool:
        """Whether its sum will be made, wholly or in part, in the team's memory."""
        return isinstance(self.route(form), SharedRoute | LevelRoute)
