"""Interfaces, addresses and shapers of a lab's hosts, by netlink. Nothing is ever made in the root namespace.

    two hosts:   host0 eth0 ══════════════ eth0 host1           ══ one veth pair, tbf on both ends

    more:        host0 eth0 ══ port0 ┐
                 host1 eth0 ══ port1 ┤ switch                   a bridge in a namespace of its own
                 host2 eth0 ══ port2 ┘

tbf shapes what leaves an interface, so with one at each end of a link both directions have the full rate. There is no
delay to set: the latency of a link is that of this machine's kernel and scheduler.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from netlab import kernel

T = TypeVar("T")

INTERFACE = "eth0"
_UNITS = {"": 1, "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LARGEST_PACKET = 65536  # what TCP hands to an interface at once; tbf would cut it up if it did not fit into the bucket


class LabError(RuntimeError):
    """The lab cannot be built here, or what ran in it failed."""


@dataclass(frozen=True)
class Shaper:
    """A token bucket: `rate` bits per second, headers included.

    Args:
        rate: Bits per second.
        burst: Bytes that may leave at full speed after a pause; two packets or 1 ms, whatever is more.
        queue: Bytes that wait before others are dropped; 100 ms.
    """

    rate: int
    burst: int
    queue: int

    @classmethod
    def of(cls, rate: str | int, burst: int | None = None, queue: int | None = None) -> Shaper:
        """With defaults, checked."""
        bits = bits_per_second(rate)
        burst = max(2 * _LARGEST_PACKET, bits // 8000) if burst is None else burst
        queue = max(bits // 80, 2 * burst) if queue is None else queue
        for name, value in (("burst", burst), ("queue", queue)):
            if type(value) is not int or not 2000 <= value < 2**32:
                raise ValueError(f"{name} must be a number of bytes, at least one packet (2000), got {value!r}")
        return cls(bits, burst, queue)


def bits_per_second(rate: str | int) -> int:
    """A rate as `tc` writes it.

    >>> bits_per_second("100mbit"), bits_per_second("2.5gbit"), bits_per_second(64000)
    (100000000, 2500000000, 64000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(rate).lower())
    bits = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if isinstance(rate, bool) or not 8000 <= bits <= 32 * 10**9:
        raise ValueError(f"rate must be from 8kbit to 32gbit, such as '100mbit' or a number of bits/s, got {rate!r}")
    return bits


def address(host: int) -> str:
    """The address of a host of a lab."""
    return f"10.0.0.{host + 1}"


def connect(hosts: Sequence[int], switch: int | None, shaper: Shaper | None) -> None:
    """Wire up hosts, given by the pids of their inits; without a switch there are two."""
    if switch is None:
        first, second = hosts
        _inside(first, lambda ip: _add_pair(ip, INTERFACE, second))
    else:
        _inside(switch, lambda ip: _set_up_switch(ip, hosts, shaper))
    for index, host in enumerate(hosts):
        _inside(host, partial(_set_up_host, own=address(index), shaper=shaper))


def times_held(host: int) -> int:
    """How often a host's shaper made a packet wait."""

    def read(ip: Any) -> int:
        shapers = [each for each in ip.get_qdiscs() if each.get("TCA_KIND") == "tbf"]
        return sum(each.get("TCA_STATS2").get("TCA_STATS_QUEUE")["overlimits"] for each in shapers)

    return _inside(host, read)


def _add_pair(ip: Any, name: str, host: int) -> None:
    try:
        ip.link("add", kind="veth", ifname=name, peer={"ifname": INTERFACE, "net_ns_pid": host})
    except Exception as error:
        raise _refused(error, "veth") from error


def _set_up_switch(ip: Any, hosts: Sequence[int], shaper: Shaper | None) -> None:
    try:
        ip.link("add", kind="bridge", ifname="switch")
    except Exception as error:
        raise _refused(error, "bridge") from error
    switch = _turn_on(ip, "switch")
    for index, host in enumerate(hosts):
        _add_pair(ip, f"port{index}", host)
        port = _turn_on(ip, f"port{index}")
        ip.link("set", index=port, master=switch)
        _shape(ip, port, shaper)


def _set_up_host(ip: Any, own: str, shaper: Shaper | None) -> None:
    _turn_on(ip, "lo")
    wire = _turn_on(ip, INTERFACE)
    ip.addr("add", index=wire, address=own, prefixlen=24)
    _shape(ip, wire, shaper)


def _turn_on(ip: Any, name: str) -> int:
    index: int = ip.link_lookup(ifname=name)[0]
    ip.link("set", index=index, state="up")
    return index


def _shape(ip: Any, index: int, shaper: Shaper | None) -> None:
    if shaper is None:
        return
    # pyroute2 makes the queue's bytes from a latency in microseconds, to which it adds the burst.
    waiting_us = 8e6 * (shaper.queue - shaper.burst) / shaper.rate
    try:
        ip.tc("add", "tbf", index, 0x10000, rate=shaper.rate // 8, burst=shaper.burst, latency=waiting_us)
    except Exception as error:
        raise _refused(error, "sch_tbf") from error


def _refused(error: Exception, module: str) -> Exception:
    """A sentence, where the kernel does not know what we ask for."""
    if getattr(error, "code", None) in (errno.EOPNOTSUPP, errno.ENOENT):
        return LabError(f"this kernel has no {module}")
    return error


def _inside(host: int, work: Callable[[Any], T]) -> T:
    """`work` with a netlink socket of that host's network; in a thread, since a thread can move there and be gone."""
    from pyroute2 import IPRoute  # late: to be asked whether the lab is available must not need it

    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            pidfd = os.pidfd_open(host)
            try:
                kernel.join(pidfd, kernel.NEWNET)
            finally:
                os.close(pidfd)
            with IPRoute() as ip:
                results.append(work(ip))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="netlab-wiring")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
