"""`measure`: what the links and the ranks of a group can do, as a cluster to plan by.

In stages, each by all ranks of the group at once:

    meet         groups of our own, who shares a host
    compute      equal bursts on all ranks, two threads each, one rank alone; copies
    codecs       every compressor on a bucket
    across       all-reduces of rising size between one rank of each host, then beside computation
    inside       the same among the ranks of each host
    memory       the same in shared memory
    neighbours   hosts in pairs, if there are at least three

What a probe found, as data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from gradsync.cluster import Cluster, Device
from gradsync.exchange.routes import NativeRoute, SharedRoute
from gradsync.planner.catalogue import DEVICES
from gradsync.probe.all_reduce_times import BackendSums, Caller, SharedMemorySums, TimedCall, across, inside, sweep
from gradsync.probe.codecs import codec_speeds
from gradsync.probe.fit import Fit, TimedMessage, fit, memory_message, ring_message
from gradsync.probe.pairs import measure_neighbours, slow_links
from gradsync.probe.probe_group import ProbeGroup, open_probe_group
from gradsync.probe.processor import ComputeLoad, examine, processor_share, slow_rank_warnings


@dataclass(frozen=True)
class ProbeFindings:
    """The cluster, what it was fitted to, and what looked wrong.

    Args:
        cluster: To plan by; calibrated.
        tiers: What was measured of each link, by its name in the cluster: "across", "inside", "memory".
        warnings: Slow ranks and links by name, and whatever else makes the numbers doubtful.
    """

    cluster: Cluster
    tiers: dict[str, Fit]
    warnings: tuple[str, ...] = ()

    @property
    def median_error(self) -> float:
        """The distance of the fitted links from what was measured at sizes kept back: relative, in the middle."""
        return median(error for fit in self.tiers.values() for error in fit.errors)

    @property
    def worst_error(self) -> float:
        return max(error for fit in self.tiers.values() for error in fit.errors)


STAGES = ("meet", "compute", "codecs", "across", "inside", "memory", "neighbours")
_TINY_NUMEL = 16
_TINY_CALLS = 25
_LONG_S = 0.1

Tick = Callable[[str], None]


def measure(parent: dist.ProcessGroup, tick: Tick | None = None, brief: bool = False) -> ProbeFindings:
    """Measure the links and the ranks of a group; every rank calls this at once, and all get the same.

    Some ten seconds, or with `brief` one or two. `tick` is told each of the `STAGES` when it is over. Nothing else
    should run meanwhile: what the ranks compute at the time is taken for how slow they are.
    """
    if parent.size() < 2:
        raise ValueError("there is nothing to measure between the ranks of a group of 1; start at least 2")
    done = tick or (lambda stage: None)
    with open_probe_group(parent, brief) as group:
        done("meet")
        compute = ComputeLoad(group)
        processor = examine(group, compute)
        done("compute")
        codecs = codec_speeds(group)
        done("codecs")
        tiers = _measure_tiers(group, compute, done)
        call_s = _call_s(group)
        pairs = measure_neighbours(group) if len(group.hosts) > 2 and not brief else []
        done("neighbours")
        warnings = (*slow_rank_warnings(processor, group.name_of), *slow_links(pairs, group.name_of_host))
        name = _device_name(group)
        known = _of_catalogue(name)
        flops = median(group.tell_one(compute.flops()))  # every rank takes part, also where the catalogue knows better
        device = Device(
            name=name,
            kind="gpu" if group.device.type == "cuda" else "cpu",
            flops=known.flops if known is not None else flops,
            memory_nbytes=known.memory_nbytes if known is not None else 0.0,
            memory_bandwidth=processor.memory_bandwidth,
            cores=processor.cores,
            codecs=codecs,
            call_s=call_s,
            jitter=processor.jitter,
        )
        return ProbeFindings(_cluster(group, tiers, device), tiers, warnings)


def _measure_tiers(group: ProbeGroup, compute: ComputeLoad, done: Tick) -> dict[str, Fit]:
    tiers: dict[str, Fit] = {}
    if len(group.hosts) > 1:
        tiers["across"] = _fit_backend(group, compute, across(group))
    done("across")
    if group.full_hosts:
        tiers["inside"] = _fit_backend(group, compute, inside(group))
    done("inside")
    if group.lane.team is not None and group.on_host:
        shared = SharedMemorySums(group, group.lane.team, group.full_hosts)
        timed = sweep(group, shared)
        samples = [TimedMessage(*memory_message(each.nbytes, each.seconds), each.checks) for each in timed]
        tiers["memory"] = fit(samples, _load(group, compute, shared, timed))
    done("memory")
    return tiers


def _fit_backend(group: ProbeGroup, compute: ComputeLoad, sums: BackendSums) -> Fit:
    timed, num_ranks = sweep(group, sums), len(sums.teams[0])
    samples = [TimedMessage(*ring_message(each.nbytes, each.seconds, num_ranks), each.checks) for each in timed]
    return fit(samples, _load(group, compute, sums, timed))


def _load(group: ProbeGroup, compute: ComputeLoad, caller: Caller, timed: list[TimedCall]) -> float:
    """The processor's share while large messages are on their way: the largest that do not take long."""
    by_size = {each.nbytes: each.seconds for each in sorted(timed, key=lambda each: -each.seconds)}
    nbytes = max((size for size, seconds in by_size.items() if seconds <= _LONG_S), default=min(by_size))
    return processor_share(group, compute, caller, nbytes, by_size[nbytes])


def _call_s(group: ProbeGroup) -> float:
    """Return what it takes to start the sum of a bucket, and to learn that it is there."""
    team = group.lane.team if group.lane.one_host and group.on_host else None
    route = NativeRoute(group.lane) if team is None else SharedRoute(group.lane, team)
    flat = torch.zeros(_TINY_NUMEL, dtype=torch.float32, device=group.wire)
    group.meet()
    mine = [_call_once(group, route, flat) for _ in range(_TINY_CALLS)]
    return median(median(row) for row in group.tell(mine))


def _call_once(group: ProbeGroup, route: NativeRoute | SharedRoute, flat: torch.Tensor) -> float:
    begun = time.perf_counter()
    pending = route.launch(flat, 0)
    launched = time.perf_counter()
    group.lane.wait(pending)
    late_s = max(0.0, time.perf_counter() - pending.finished_at) if pending.on_host else 0.0
    return launched - begun + late_s


def _cluster(group: ProbeGroup, tiers: dict[str, Fit], device: Device) -> Cluster:
    """A tier that is not there (one host, or one rank on each) is taken to be like the other one."""
    inner, outer = tiers.get("inside"), tiers.get("across")
    links = [each.link for each in (inner or outer, outer or inner) if each is not None]
    memory = tiers.get("memory")
    return Cluster(
        group.hosts,
        inside=links[0],
        across=links[1],
        memory=None if memory is None else memory.link,
        backend="gloo" if group.on_host else "nccl",
        device=device,
        calibrated=True,
        name=_name(group),
    )


def _name(group: ProbeGroup) -> str:
    count = len(group.hosts)
    return f"{group.size} ranks on {'one host' if count == 1 else f'{count} hosts'}, {group.name_of_host(0)} the first"


def _of_catalogue(name: str) -> Device | None:
    """The catalogue's entry of a device that calls itself so; the longest name that fits, none for a processor.

    >>> _of_catalogue("NVIDIA H100 80GB HBM3").name, _of_catalogue("NVIDIA GeForce RTX 4090").name, _of_catalogue("cpu")
    ('h100', 'rtx4090', None)
    """
    plain = name.lower().replace(" ", "").replace("-", "")
    fitting = [key for key, part in DEVICES.items() if part.device.kind == "gpu" and key.replace("-", "") in plain]
    return DEVICES[max(fitting, key=len)].device if fitting else None


def _device_name(group: ProbeGroup) -> str:
    """The name of rank 0's device, which all agree on."""
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "cpu"
    return group.lane.exchange(name.encode()[:64].ljust(64), "the names of the devices")[0].decode().strip()
