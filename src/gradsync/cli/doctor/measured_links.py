"""The measurements between the ranks: each link in a ring of hosts, or of ranks on one host, and the hosts' clocks.

Every rank of the group takes part, and all get the same.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync.cli.doctor.check_network import chosen_nic
from gradsync.cli.doctor.finding import Finding, Grade
from gradsync.cli.doctor.rank_facts import Facts
from gradsync.cluster import Link
from gradsync.probe.pairs import HostPair, rounds_of, slow_links
from gradsync.probe.probe_group import ProbeGroup, open_probe_group
from gradsync.transport.groups import MESSAGES
from gradsync.transport.link_speed import LOAD_NBYTES, measure_pairs
from gradsync.units import show_bits, show_seconds

STAGES = ("meet", "links", "clocks")
_TRIES = 3  # the shortest times count: whatever disturbs makes them longer
_PINGS = 9
_TAG = (1 << 31) - 2
_TIME = struct.Struct("<d")
_APART_S = 1.0
_SHARE, _ONE_STREAM = 0.4, 25e9 / 8  # one connection fills no faster card than that

Tick = Callable[[str], None]


class MeasuredLink(NamedTuple):
    """The link from one host or rank to the next."""

    first: str
    second: str
    latency_s: float
    bandwidth: float  # bytes per second


class HostClockOffset(NamedTuple):
    """The time by which a host's wall clock is ahead of rank 0's."""

    host: str
    offset_s: float
    error_s: float


class MeasuredLinks(NamedTuple):
    """All measurements between the ranks."""

    across: bool = False  # between hosts
    links: Sequence[MeasuredLink] = ()
    slow: Sequence[str] = ()  # a sentence for each
    clocks: Sequence[HostClockOffset] = ()


def measure_links(parent: dist.ProcessGroup, tick: Tick) -> MeasuredLinks:
    """Measure the links and clocks for a second or so; `tick` is told each of the `STAGES`."""
    with open_probe_group(parent, brief=True) as group:
        tick("meet")
        across = len(group.hosts) > 1
        ranks = [host[0] for host in group.hosts] if across else list(range(group.size))
        name_of = group.name_of_host if across else group.name_of
        pairs, neighbours = _ring(group, ranks, name_of)
        tick("links")
        clocks = _clocks(group) if across else []
        tick("clocks")
        # Over loopback a slow pair is one whose turn on the processor came late: no link to blame.
        return MeasuredLinks(across, neighbours, slow_links(pairs, name_of) if across else [], clocks)


def check_links(measured: MeasuredLinks, facts: Sequence[Facts]) -> list[Finding]:
    """The odd link out, and links far below what their cards could do."""
    if not measured.links:
        return []
    nic = chosen_nic(facts[0])
    name = "eth0" if nic is None else nic.name
    fix = f"sudo ethtool -s {name} autoneg on    # after: sudo ethtool {name} | grep -e Speed -e Duplex, on both hosts"
    found = [Finding(Grade.WRONG, "a slow link", sentence, fix) for sentence in measured.slow]
    rates = [link.bandwidth for link in measured.links]
    cards = [0 if (card := chosen_nic(each)) is None else card.mbit for each in facts]
    line = min(cards) * 1e6 / 8
    if measured.across and 0 < line <= _ONE_STREAM and max(rates) < _SHARE * line:
        detail = f"{show_bits(max(rates))} at best, and the cards say {show_bits(line)}"
        found.append(
            Finding(Grade.NOTE, "links far below their cards", detail, f"sudo ethtool -S {name} | grep -i err")
        )
    if found:
        return found
    slowest = min(measured.links, key=lambda link: link.bandwidth)
    told = f"{show_bits(min(rates))} to {show_bits(max(rates))}" if len(rates) > 1 else show_bits(rates[0])
    latency = show_seconds(max(link.latency_s for link in measured.links))
    where = "between hosts" if measured.across else "between ranks of this host, over loopback"
    return [Finding(Grade.OK, f"links {where}", f"{told}, {latency}; the slowest {slowest.first} → {slowest.second}")]


def check_clocks(measured: MeasuredLinks) -> list[Finding]:
    """Wall clocks, by which people compare logs."""
    far = [each for each in measured.clocks if abs(each.offset_s) - each.error_s > _APART_S]
    if far:
        told = "; ".join(f"{each.host} is {each.offset_s:+.3f} s from rank 0's" for each in far)
        detail = f"{told}: times in their logs cannot be compared (gradsync's traces measure it, and correct it)"
        return [Finding(Grade.NOTE, "clocks differ between hosts", detail, "sudo timedatectl set-ntp true    # there")]
    if not measured.clocks:
        return []
    worst = max(measured.clocks, key=lambda each: abs(each.offset_s))
    told = f"at most {show_seconds(abs(worst.offset_s))} apart, to {show_seconds(worst.error_s)}"
    return [Finding(Grade.OK, "clocks of the hosts", told)]


def _ring(
    group: ProbeGroup, ranks: Sequence[int], name_of: Callable[[int], str]
) -> tuple[list[HostPair], list[MeasuredLink]]:
    pairs, neighbours = [], []
    for together in rounds_of(len(ranks)):
        tries = [measure_pairs(group.lane, [(ranks[a], ranks[b]) for a, b in together]) for _ in range(_TRIES)]
        for (a, b), links in zip(together, zip(*tries, strict=True), strict=True):
            best = _best(links)
            pairs.append(HostPair(a, b, best.bandwidth))
            neighbours.append(MeasuredLink(name_of(a), name_of(b), best.latency_s, best.bandwidth))
    return pairs, neighbours


def _best(links: Sequence[Link]) -> Link:
    """The best of all tries, by ping and by load; a load takes at least a tenth of its time itself.

    >>> _best([Link(1e-3, 1e18), Link(1e-4, LOAD_NBYTES / 1e-3)]).bandwidth == LOAD_NBYTES / 1e-3
    True
    """
    latency_s = min(link.latency_s for link in links)
    load_s = min(LOAD_NBYTES / link.bandwidth + 2 * link.latency_s for link in links)
    return Link(latency_s, LOAD_NBYTES / max(load_s - 2 * latency_s, load_s / 10))


def _clocks(group: ProbeGroup) -> list[HostClockOffset]:
    """Rank 0 asks the first rank of every other host for the time, again and again; the shortest way there and back is
    the surest, and half of it the error."""
    lane, firsts = group.lane, [host[0] for host in group.hosts[1:]]
    told: list[tuple[float, float]] = [(0.0, 0.0)] * len(firsts)

    def talk() -> None:
        if lane.groups.rank == 0:
            told[:] = [min((_ask(group, rank) for _ in range(_PINGS)), key=lambda each: each[1]) for rank in firsts]
        elif lane.groups.rank in firsts:
            for _ in range(_PINGS):
                _answer(group)

    lane.wait(lane.send(talk, "the comparison of clocks", 0))
    row = b"".join(_TIME.pack(number) for each in told for number in each)
    numbers = [number for (number,) in _TIME.iter_unpack(lane.exchange(row, "the comparison of clocks")[0])]
    return [
        HostClockOffset(group.name_of_host(index + 1), numbers[2 * index], numbers[2 * index + 1])
        for index in range(len(firsts))
    ]


def _ask(group: ProbeGroup, rank: int) -> tuple[float, float]:
    channel, message = group.lane.groups.gloo(MESSAGES), torch.zeros(_TIME.size, dtype=torch.uint8, device="cpu")
    begun, ahead = time.perf_counter(), time.time()
    channel.send(message, rank, _TAG).wait()
    channel.recv(message, rank, _TAG).wait()
    took = time.perf_counter() - begun
    return _TIME.unpack(bytes(message.numpy()))[0] - (ahead + took / 2), took / 2


def _answer(group: ProbeGroup) -> None:
    channel, message = group.lane.groups.gloo(MESSAGES), torch.zeros(_TIME.size, dtype=torch.uint8, device="cpu")
    channel.recv(message, 0, _TAG).wait()
    channel.send(torch.frombuffer(bytearray(_TIME.pack(time.time())), dtype=torch.uint8), 0, _TAG).wait()
