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
from gradsync.probe.all_reduce_times import BackendSums, Caller, Memory, Timed, across, inside, sweep
from gradsync.probe.codecs import codec_speeds
from gradsync.probe.fit import Fit, TimedMessage, fit, memory_message, ring_message
from gradsync.probe.pairs import measure_neighbours, slow_links
from gradsync.probe.probe_group import Crew, gather_crew
from gradsync.probe.processor import Labour, burden, examine, unlike_the_others


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
        """How far the fitted links are from what was measured at sizes kept back: relative, in the middle."""
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
    with gather_crew(parent, brief) as crew:
        done("meet")
        labour = Labour(crew)
        processor = examine(crew, labour)
        done("compute")
        codecs = codec_speeds(crew)
        done("codecs")
        tiers = _measure_tiers(crew, labour, done)
        call_s = _call_s(crew)
        pairs = measure_neighbours(crew) if len(crew.hosts) > 2 and not brief else []
        done("neighbours")
        warnings = (*unlike_the_others(processor, crew.name_of), *slow_links(pairs, crew.name_of_host))
        name = _device_name(crew)
        known = _of_catalogue(name)
        flops = median(crew.tell_one(labour.flops()))  # every rank takes part, also where the catalogue knows better
        device = Device(
            name=name,
            kind="gpu" if crew.device.type == "cuda" else "cpu",
            flops=known.flops if known is not None else flops,
            memory_nbytes=known.memory_nbytes if known is not None else 0.0,
            memory_bandwidth=processor.memory_bandwidth,
            cores=processor.cores,
            codecs=codecs,
            call_s=call_s,
            jitter=processor.jitter,
        )
        return ProbeFindings(_cluster(crew, tiers, device), tiers, warnings)


def _measure_tiers(crew: Crew, labour: Labour, done: Tick) -> dict[str, Fit]:
    tiers: dict[str, Fit] = {}
    if len(crew.hosts) > 1:
        tiers["across"] = _fit_wires(crew, labour, across(crew))
    done("across")
    if crew.full_hosts:
        tiers["inside"] = _fit_wires(crew, labour, inside(crew))
    done("inside")
    if crew.lane.team is not None and crew.on_host:
        shared = Memory(crew, crew.lane.team, crew.full_hosts)
        timed = sweep(crew, shared)
        samples = [TimedMessage(*memory_message(each.nbytes, each.seconds), each.checks) for each in timed]
        tiers["memory"] = fit(samples, _load(crew, labour, shared, timed))
    done("memory")
    return tiers


def _fit_wires(crew: Crew, labour: Labour, wires: BackendSums) -> Fit:
    timed, num_ranks = sweep(crew, wires), len(wires.teams[0])
    samples = [TimedMessage(*ring_message(each.nbytes, each.seconds, num_ranks), each.checks) for each in timed]
    return fit(samples, _load(crew, labour, wires, timed))


def _load(crew: Crew, labour: Labour, caller: Caller, timed: list[Timed]) -> float:
    """While large messages are on their way: the largest that do not take long."""
    by_size = {each.nbytes: each.seconds for each in sorted(timed, key=lambda each: -each.seconds)}
    nbytes = max((size for size, seconds in by_size.items() if seconds <= _LONG_S), default=min(by_size))
    return burden(crew, labour, caller, nbytes, by_size[nbytes])


def _call_s(crew: Crew) -> float:
    """What it takes to start the sum of a bucket, and to learn that it is there."""
    team = crew.lane.team if crew.lane.one_host and crew.on_host else None
    route = NativeRoute(crew.lane) if team is None else SharedRoute(crew.lane, team)
    flat = torch.zeros(_TINY_NUMEL, dtype=torch.float32, device=crew.wire)
    crew.meet()
    mine = [_call_once(crew, route, flat) for _ in range(_TINY_CALLS)]
    return median(median(row) for row in crew.tell(mine))


def _call_once(crew: Crew, route: NativeRoute | SharedRoute, flat: torch.Tensor) -> float:
    begun = time.perf_counter()
    pending = route.launch(flat, 0)
    launched = time.perf_counter()
    crew.lane.wait(pending)
    late_s = max(0.0, time.perf_counter() - pending.finished_at) if pending.on_host else 0.0
    return launched - begun + late_s


def _cluster(crew: Crew, tiers: dict[str, Fit], device: Device) -> Cluster:
    """A tier that is not there (one host, or one rank on each) is taken to be like the other one."""
    inner, outer = tiers.get("inside"), tiers.get("across")
    links = [each.link for each in (inner or outer, outer or inner) if each is not None]
    memory = tiers.get("memory")
    return Cluster(
        crew.hosts,
        inside=links[0],
        across=links[1],
        memory=None if memory is None else memory.link,
        backend="gloo" if crew.on_host else "nccl",
        device=device,
        calibrated=True,
        name=_name(crew),
    )


def _name(crew: Crew) -> str:
    count = len(crew.hosts)
    return f"{crew.size} ranks on {'one host' if count == 1 else f'{count} hosts'}, {crew.name_of_host(0)} the first"


def _of_catalogue(name: str) -> Device | None:
    """The catalogue's entry of a device that calls itself so; the longest name that fits, none for a processor.

    >>> _of_catalogue("NVIDIA H100 80GB HBM3").name, _of_catalogue("NVIDIA GeForce RTX 4090").name, _of_catalogue("cpu")
    ('h100', 'rtx4090', None)
    """
    plain = name.lower().replace(" ", "").replace("-", "")
    fitting = [key for key, part in DEVICES.items() if part.device.kind == "gpu" and key.replace("-", "") in plain]
    return DEVICES[max(fitting, key=len)].device if fitting else None


def _device_name(crew: Crew) -> str:
    """Rank 0's, which all agree on."""
    name = torch.cuda.get_device_name(crew.device) if crew.device.type == "cuda" else "cpu"
    return crew.lane.exchange(name.encode()[:64].ljust(64), "the names of the devices")[0].decode().strip()
