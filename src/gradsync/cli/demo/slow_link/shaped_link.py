"""Two networks of this machine, joined by a link of a given rate. Nothing is ever made in the root network.

    10.0.0.1 eth0 ══════════════ eth0 10.0.0.2        ══ one veth pair, tbf on both ends

tbf shapes what leaves an interface, so with one at each end of a link both directions have the full rate. There is no
delay to set: the latency of a link is that of this machine's kernel and scheduler. A network lasts as long as a process
is in it, and the link as long as its networks: there is nothing to take down.
"""

from __future__ import annotations

import errno
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gradsync.cli.demo.slow_link import namespaces
from gradsync.cli.demo.slow_link.netlink import NEWADDR, NEWLINK, NEWQDISC, Netlink, attribute
from gradsync.errors import GradSyncError

T = TypeVar("T")

INTERFACE = "eth0"
_UNITS = {"": 1, "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LARGEST_PACKET = 65536  # what TCP hands to an interface at once; tbf would cut it up if it did not fit into the bucket

# From linux/if_link.h, linux/veth.h, linux/if_addr.h, linux/pkt_sched.h and linux/rtnetlink.h.
_IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_NS_PID = 3, 10, 18, 19
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_TCA_KIND, _TCA_OPTIONS, _TCA_TBF_PARMS, _TCA_TBF_BURST = 1, 2, 1, 6
_IFF_UP = 1
_ROOT = 0xFFFF_FFFF  # the qdisc that all packets of an interface go through
_ETHERNET = 1  # how tbf counts: without it, it wants a table of times by packet size
_LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, which of them to change
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix, flags, scope, index
QDISC = struct.Struct("=BxxxiIII")  # tcmsg: family, index, handle, parent, info
_RATE = struct.Struct("=BBHhHI")  # tc_ratespec: cell, how it counts, overhead, alignment, smallest packet, bytes/s
_NUMBER = struct.Struct("=I")
_TBF = struct.Struct("=III")  # the rest of tc_tbf_qopt: bytes that may wait, and what _TCA_TBF_BURST says better


class NoLink(GradSyncError):
    """The kernel has no such links."""


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
        """The shaper of a rate, with defaults, checked.

        >>> Shaper.of("100mbit")
        Shaper(rate=100000000, burst=131072, queue=1250000)
        """
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
    """The address of a host, by its number."""
    return f"10.0.0.{host + 1}"


def connect(first: int, second: int, shaper: Shaper | None) -> None:
    """Join the networks of two processes, given by their pids; from then on they are hosts 0 and 1."""
    inside(first, lambda kernel: add_pair(kernel, INTERFACE, second))
    for host, pid in enumerate((first, second)):
        set_up(pid, host, shaper)


def set_up(pid: int, host: int, shaper: Shaper | None) -> None:
    """Turn on loopback and an end of the link in a process's network, under the address of that host."""

    def work(kernel: Netlink) -> None:
        turn_on(kernel, "lo")
        turn_on(kernel, INTERFACE)
        _give_address(kernel, address(host))
        shape(kernel, INTERFACE, shaper)

    inside(pid, work)


def try_out(shaper: Shaper) -> None:
    """Make a link with both ends in a network that is gone at once: raises here what `connect` would raise later."""

    def work(kernel: Netlink) -> None:
        _add_link(kernel, INTERFACE, "veth", attribute(_VETH_INFO_PEER, _LINK.pack(0, 0, 0, 0, 0) + _name("peer")))
        shape(kernel, INTERFACE, shaper)

    _elsewhere(lambda: namespaces.unshare(namespaces.NEWNET), work)


# In the network of one process


def inside(pid: int, work: Callable[[Netlink], T]) -> T:
    """The value of `work`, which is given the kernel as the network of that process has it."""
    return _elsewhere(lambda: namespaces.join(pid, namespaces.NEWNET), work)


def add_pair(kernel: Netlink, name: str, other: int) -> None:
    """A link from here, where its end is called so, to the network of the process `other`, where it is `INTERFACE`."""
    there = _LINK.pack(0, 0, 0, 0, 0) + _name(INTERFACE) + attribute(_IFLA_NET_NS_PID, _NUMBER.pack(other))
    _add_link(kernel, name, "veth", attribute(_VETH_INFO_PEER, there))


def add_bridge(kernel: Netlink, name: str) -> None:
    """A switch, to which ports are to be added."""
    _add_link(kernel, name, "bridge", b"")


def turn_on(kernel: Netlink, name: str, bridge: str | None = None) -> None:
    """Set an interface up, and make it a port of a bridge."""
    master = b"" if bridge is None else attribute(_IFLA_MASTER, _NUMBER.pack(socket.if_nametoindex(bridge)))
    kernel.change(NEWLINK, _LINK.pack(0, 0, socket.if_nametoindex(name), _IFF_UP, _IFF_UP) + master)


def turn_off(kernel: Netlink, name: str) -> None:
    """Have an interface carry nothing until it is turned on."""
    kernel.change(NEWLINK, _LINK.pack(0, 0, socket.if_nametoindex(name), 0, _IFF_UP))


def shape(kernel: Netlink, name: str, shaper: Shaper | None) -> None:
    """Slow down what leaves by an interface; not at all without a shaper."""
    if shaper is None:
        return
    rate = _RATE.pack(0, _ETHERNET, 0, 0, 0, shaper.rate // 8)
    no_peak = bytes(_RATE.size)
    options = attribute(_TCA_TBF_PARMS, rate + no_peak + _TBF.pack(shaper.queue, 0, 0))
    options += attribute(_TCA_TBF_BURST, _NUMBER.pack(shaper.burst))
    body = QDISC.pack(0, socket.if_nametoindex(name), 0, _ROOT, 0)
    body += attribute(_TCA_KIND, b"tbf\0") + attribute(_TCA_OPTIONS, options)
    try:
        kernel.create(NEWQDISC, body)
    except OSError as error:
        raise _refused(error, "sch_tbf") from error


def _add_link(kernel: Netlink, name: str, kind: str, data: bytes) -> None:
    info = attribute(_IFLA_INFO_KIND, kind.encode()) + attribute(_IFLA_INFO_DATA, data)
    try:
        kernel.create(NEWLINK, _LINK.pack(0, 0, 0, 0, 0) + _name(name) + attribute(_IFLA_LINKINFO, info))
    except OSError as error:
        raise _refused(error, kind) from error


def _give_address(kernel: Netlink, own: str) -> None:
    number = socket.inet_aton(own)
    body = _ADDRESS.pack(socket.AF_INET, 24, 0, 0, socket.if_nametoindex(INTERFACE))
    kernel.create(NEWADDR, body + attribute(_IFA_LOCAL, number) + attribute(_IFA_ADDRESS, number))


def _name(name: str) -> bytes:
    return attribute(_IFLA_IFNAME, name.encode() + b"\0")


def _refused(error: OSError, module: str) -> Exception:
    """A sentence, where the kernel does not know what we ask for."""
    if error.errno in (errno.EOPNOTSUPP, errno.ENOENT):
        return NoLink(f"this kernel has no {module}")
    return error


def _elsewhere(go: Callable[[], None], work: Callable[[Netlink], T]) -> T:
    """`work` in another network: a thread can move there and be gone."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            go()
            with Netlink() as kernel:
                results.append(work(kernel))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="gradsync-wiring")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
