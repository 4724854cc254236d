"""Making the ways that a plan may ask for, once, when a group begins; every rank of the group does so at once."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync.allreduce.choice import CANDIDATES, LOOPBACK, Algorithm
from gradsync.allreduce.hierarchical import Hierarchical
from gradsync.allreduce.native import Native
from gradsync.allreduce.schedule import Recipe
from gradsync.allreduce.shared_memory import SharedMemory
from gradsync.errors import NotEnoughMemory
from gradsync.exchange.levels import LevelRoute
from gradsync.exchange.messages import MessageRoute
from gradsync.exchange.pinned import HostRoute, PinnedRoute
from gradsync.exchange.shared import SharedRoute
from gradsync.links import Cluster
from gradsync.transport.gauge import measure_across
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane


class Misfit(ValueError):
    """The plan's algorithm does not fit this group; every rank finds it out."""


class Ways(NamedTuple):
    """For each kind of algorithm, how tensors of a device type take it; what is missing goes by the backend."""

    by_device: dict[str, dict[type, HostRoute | PinnedRoute | MessageRoute]]
    cluster: Cluster | None  # to choose by, where there is a choice

    def of(self, device_type: str, algorithm: Algorithm) -> HostRoute | PinnedRoute | MessageRoute | None:
        return self.by_device.get(device_type, {}).get(type(algorithm))


def open_ways(
    lane: Lane, parent: dist.ProcessGroup, algorithm: Algorithm | None, devices: dict[str, torch.device], timeout: float
) -> Ways:
    """The ways for tensors on these devices, whose channels exist."""
    on_nccl = [kind for kind in devices if not lane.groups.data[kind].on_host]
    _refuse_misfit(lane, algorithm, on_nccl)
    if lane.groups.size == 1 or isinstance(algorithm, Native):
        return Ways({}, None)
    by_device: dict[str, dict[type, HostRoute | PinnedRoute | MessageRoute]] = {}
    cluster = None
    if len(on_nccl) < len(devices):
        on_host, cluster = _host_ways(lane, parent, algorithm, timeout)
        for kind, device in devices.items():
            if kind == "cpu":
                by_device[kind] = dict(on_host)
            elif kind not in on_nccl:
                by_device[kind] = {wanted: PinnedRoute(lane, way, device) for wanted, way in on_host.items()}
    for kind in on_nccl:
        if algorithm is not None:
            by_device[kind] = {type(algorithm): MessageRoute(lane, _recipe(algorithm))}
    return Ways(by_device, cluster)


def _refuse_misfit(lane: Lane, algorithm: Algorithm | None, on_nccl: list[str]) -> None:
    if isinstance(algorithm, SharedMemory):
        if len(lane.hosts) > 1:
            raise Misfit(
                f"gs.shared_memory() is for the ranks of one host, but this group spans {len(lane.hosts)}; "
                "use gs.hierarchical(), which uses shared memory inside each"
            )
        if on_nccl:
            raise Misfit("gs.shared_memory() is not for tensors on NCCL; use gs.native(), or a gloo group")
        if not lane.has_library:
            raise Misfit(f"gs.shared_memory() is not offered: {lane.lacks}")
    elif on_nccl and algorithm is not None and not isinstance(algorithm, Native):
        warnings.warn(
            f"{algorithm!r} on NCCL sends point to point, which was not measured: no two GPUs were at hand; "
            "gs.native() is the default there",
            stacklevel=7,
        )


def _host_ways(
    lane: Lane, parent: dist.ProcessGroup, algorithm: Algorithm | None, timeout: float
) -> tuple[dict[type, HostRoute], Cluster | None]:
    if lane.lacks and isinstance(algorithm, SharedMemory | Hierarchical | None):
        warnings.warn(f"{lane.lacks}; the process group serves instead of shared memory", stacklevel=8)
    if len(lane.hosts) == 1 and isinstance(algorithm, SharedMemory | None):
        return ({} if lane.team is None else {SharedMemory: SharedRoute(lane, lane.team)}), None
    if MESSAGES not in lane.groups.data:
        lane.groups.add_data(parent, [MESSAGES], timeout)
    if algorithm is not None:
        return {type(algorithm): _host_way(lane, _recipe(algorithm))}, None
    cluster = Cluster(lane.hosts, inside=LOOPBACK, across=measure_across(lane))
    return {type(recipe): _host_way(lane, recipe) for recipe in CANDIDATES}, cluster


def _host_way(lane: Lane, recipe: Recipe) -> HostRoute:
    if isinstance(recipe, Hierarchical) and lane.team is not None and len(lane.hosts) > 1:
        try:
            return LevelRoute(lane, lane.team)
        except NotEnoughMemory as error:
            warnings.warn(f"{error}; hierarchical() sends messages inside the hosts too", stacklevel=9)
    return MessageRoute(lane, recipe)


def _recipe(algorithm: Algorithm) -> Recipe:
    assert not isinstance(algorithm, Native | SharedMemory)
    return algorithm
