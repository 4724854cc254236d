"""How the hosts of a lab are joined: as the package joins two, or by a switch. Nothing is made in the root namespace.

two hosts:   host0 eth0 ══════════════ eth0 host1           ══ one veth pair, tbf on both ends

more:        host0 eth0 ══ port0 ┐
             host1 eth0 ══ port1 ┤ switch                   a bridge in a namespace of its own
             host2 eth0 ══ port2 ┘
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gradsync.cli.demo.slow_link.netlink import GETQDISC, Netlink, attributes
from gradsync.cli.demo.slow_link.shaped_link import (
    INTERFACE,
    QDISC,
    Shaper,
    add_bridge,
    add_pair,
    address,
    bits_per_second,
    inside,
    set_up,
    shape,
    turn_off,
    turn_on,
)
from gradsync.cli.demo.slow_link.shaped_link import connect as connect_two

__all__ = ["INTERFACE", "LabError", "Shaper", "address", "bits_per_second", "connect", "times_held", "turn_link"]

_TCA_KIND, _TCA_STATS2, _TCA_STATS_QUEUE = 1, 7, 3
_QUEUE = struct.Struct("=5I")  # gnet_stats_queue: packets and bytes that wait, drops, requeues, times held


class LabError(RuntimeError):
    """The lab cannot be built here, or what ran in it failed."""


def connect(hosts: Sequence[int], switch: int | None, shaper: Shaper | None) -> None:
    """Wire up hosts, given by the pids of their inits; without a switch there are two."""
    if switch is None:
        first, second = hosts
        connect_two(first, second, shaper)
        return
    inside(switch, lambda kernel: _set_up_switch(kernel, hosts, shaper))
    for index, host in enumerate(hosts):
        set_up(host, index, shaper)


def turn_link(host: int, on: bool) -> None:
    """Have a host's link carry packets, or none at all; connections last."""
    inside(host, (lambda kernel: turn_on(kernel, INTERFACE)) if on else (lambda kernel: turn_off(kernel, INTERFACE)))


def times_held(host: int) -> int:
    """How often a host's shaper made a packet wait."""
    found = inside(host, lambda kernel: kernel.dump(GETQDISC, QDISC.pack(0, 0, 0, 0, 0)))
    qdiscs = [attributes(body[QDISC.size :]) for body in found]
    queues = [attributes(each[_TCA_STATS2])[_TCA_STATS_QUEUE] for each in qdiscs if each[_TCA_KIND] == b"tbf\0"]
    return sum(_QUEUE.unpack(queue)[4] for queue in queues)


def _set_up_switch(kernel: Netlink, hosts: Sequence[int], shaper: Shaper | None) -> None:
    add_bridge(kernel, "switch")
    turn_on(kernel, "switch")
    for index, host in enumerate(hosts):
        add_pair(kernel, f"port{index}", host)
        turn_on(kernel, f"port{index}", bridge="switch")
        shape(kernel, f"port{index}", shaper)
