"""The exact sum of a flat tensor over the ranks: which route it takes, by plan, place and size.

one host                          in shared memory
several hosts                     the cheapest by price; hierarchical uses shared memory inside each host
GPU tensors on gloo               as in host memory, through pinned memory
GPU tensors on NCCL               the backend's own all-reduce
no C library, not enough memory   the backend's own all-reduce, and a warning that says why

The routes that a plan may ask for are made once, when a group begins; every rank of the group does so at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync.algorithms.builtin import Native, SharedMemory
from gradsync.algorithms.hierarchical import Hierarchical
from gradsync.algorithms.price import CANDIDATES, LOOPBACK, MEMORY, Algorithm, cheapest
from gradsync.algorithms.schedule import Recipe
from gradsync.cluster import Cluster
from gradsync.errors import NotEnoughMemory
from gradsync.exchange.flat import Form, carve, zeros
from gradsync.exchange.pinned import PinnedRoute
from gradsync.exchange.routes import HierarchicalRoute, HostRoute, MessageRoute, NativeRoute, SharedRoute, SumRoute
from gradsync.kernels.library import CODES
from gradsync.transport.groups import HOST, MESSAGES
from gradsync.transport.lane import Lane
from gradsync.transport.link_speed import measure_across
from gradsync.transport.pending import Pending


class UnfitAlgorithm(ValueError):
    """The plan's algorithm does not fit this group; every rank finds it out."""


class RouteTable(NamedTuple):
    """The routes of a device type, by kind of algorithm; what is missing goes by the backend."""

    by_device: dict[str, dict[type, SumRoute]]
    cluster: Cluster | None  # to choose by, where there is a choice


def open_routes(
    lane: Lane, parent: dist.ProcessGroup, algorithm: Algorithm | None, devices: dict[str, torch.device]
) -> RouteTable:
    """The routes for tensors on these devices, whose channels exist."""
    on_nccl = [kind for kind in devices if not lane.groups.data[kind].on_host]
    _refuse_unfit(lane, algorithm, on_nccl)
    if lane.groups.size == 1 or isinstance(algorithm, Native):
        return RouteTable({}, None)
    by_device: dict[str, dict[type, SumRoute]] = {}
    cluster = None
    if len(on_nccl) < len(devices):
        on_host, cluster = _host_routes(lane, parent, algorithm)
        for kind, device in devices.items():
            if kind == "cpu":
                by_device[kind] = dict(on_host)
            elif kind not in on_nccl:
                by_device[kind] = {wanted: PinnedRoute(lane, route, device) for wanted, route in on_host.items()}
    for kind in on_nccl:
        if algorithm is not None:
            by_device[kind] = {type(algorithm): MessageRoute(lane, _recipe(algorithm))}
    return RouteTable(by_device, cluster)


def _refuse_unfit(lane: Lane, algorithm: Algorithm | None, on_nccl: list[str]) -> None:
    if isinstance(algorithm, SharedMemory):
        if len(lane.hosts) > 1:
            raise UnfitAlgorithm(
                f"gs.shared_memory() is for the ranks of one host, but this group spans {len(lane.hosts)}; "
                "use gs.hierarchical(), which uses shared memory inside each"
            )
        if on_nccl:
            raise UnfitAlgorithm("gs.shared_memory() is not for tensors on NCCL; use gs.native(), or a gloo group")
        if not lane.has_library:
            raise UnfitAlgorithm(f"gs.shared_memory() is not offered: {lane.lacks}")
    elif on_nccl and algorithm is not None and not isinstance(algorithm, Native):
        warnings.warn(
            f"{algorithm!r} on NCCL sends point to point, in rounds, and was slower than gs.native() wherever it was "
            "measured; gs.native() is the default there",
            stacklevel=7,
        )


def _host_routes(
    lane: Lane, parent: dist.ProcessGroup, algorithm: Algorithm | None
) -> tuple[dict[type, HostRoute], Cluster | None]:
    if lane.lacks and isinstance(algorithm, SharedMemory | Hierarchical | None):
        warnings.warn(f"{lane.lacks}; the process group serves instead of shared memory", stacklevel=8)
    if len(lane.hosts) == 1 and isinstance(algorithm, SharedMemory | None):
        return ({} if lane.team is None else {SharedMemory: SharedRoute(lane, lane.team)}), None
    if MESSAGES not in lane.groups.data:
        lane.groups.add_data(parent, {MESSAGES: HOST})
    if algorithm is not None:
        return {type(algorithm): _host_route(lane, _recipe(algorithm))}, None
    cluster = Cluster(lane.hosts, inside=LOOPBACK, across=measure_across(lane))
    return {type(recipe): _host_route(lane, recipe) for recipe in CANDIDATES}, cluster


def _host_route(lane: Lane, recipe: Recipe) -> HostRoute:
    if isinstance(recipe, Hierarchical) and lane.team is not None and len(lane.hosts) > 1:
        try:
            return HierarchicalRoute(lane, lane.team)
        except NotEnoughMemory as error:
            warnings.warn(f"{error}; hierarchical() sends messages inside the hosts too", stacklevel=9)
    return MessageRoute(lane, recipe)


def _recipe(algorithm: Algorithm) -> Recipe:
    assert not isinstance(algorithm, Native | SharedMemory)
    return algorithm


class ExactSum:
    """Sums flat tensors over the ranks of a group."""

    def __init__(
        self,
        lane: Lane,
        parent: dist.ProcessGroup,
        algorithm: Algorithm | None,
        devices: Iterable[torch.device],
    ) -> None:
        """Make the channels and routes for tensors on these devices; every rank of the group calls this at once."""
        kinds = {device.type: device for device in sorted(devices, key=str)}
        missing = {kind: device for kind, device in kinds.items() if kind not in lane.groups.data}
        lane.groups.add_data(parent, missing)
        self._lane = lane
        self._algorithm = algorithm
        self._native = NativeRoute(lane)
        self._routes = open_routes(lane, parent, algorithm, kinds)
        self._choose = lru_cache(maxsize=1024)(self._chosen)

    def launch(self, flat: torch.Tensor, bucket: int = -1) -> Pending:
        """Start summing `flat` over the ranks, in place."""
        route, real = self.route_of(flat)
        return route.launch(real, bucket)

    def route_of(self, flat: torch.Tensor) -> tuple[SumRoute, torch.Tensor]:
        """The route that this tensor takes, and as which tensor."""
        real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        return self.route(Form(real.numel(), real.dtype, real.device)), real

    def route(self, form: Form) -> SumRoute:
        """The route that such a tensor takes."""
        if form.dtype not in CODES and not form.dtype.is_complex:
            return self._native
        algorithm = self._choose(form.numel * form.dtype.itemsize) if self._algorithm is None else self._algorithm
        return self._routes.by_device.get(form.device.type, {}).get(type(algorithm), self._native)

    def _chosen(self, nbytes: int) -> Algorithm:
        if self._routes.cluster is not None:
            return cheapest(nbytes, self._routes.cluster, MEMORY if self._lane.team is not None else None)
        return SharedMemory() if self._lane.one_host else Native()

    def allocate(self, forms: list[Form]) -> list[torch.Tensor]:
        """Zeros of these forms, in the team's memory where that is of use; every rank calls this at once."""
        team = self._lane.team
        shared = [team is not None and self.route(form).sums_in_team_memory for form in forms]
        return zeros(forms) if team is None or not any(shared) else carve(team, forms, shared)
