"""The traffic that a host sent over its link, as the kernel counts it."""

from __future__ import annotations

from typing import NamedTuple

from gradsync.cli.demo.slow_link.shaped_link import INTERFACE

_HEADERS = 14 + 20 + 32  # Ethernet, IP, TCP with timestamps


class Traffic(NamedTuple):
    """The traffic of a host over its link, headers included. A packet is what TCP hands over at once, up to 64 KB."""

    nbytes: int
    packets: int


def payload(nbytes: int, packets: int) -> int:
    """Bytes without the headers of Ethernet, IP and TCP (with timestamps, as Linux does).

    >>> payload(1514, 1)
    1448
    """
    return nbytes - packets * _HEADERS


def sent(table: str) -> Traffic:
    """The traffic in /proc/net/dev: after the name come 8 numbers of what was received, then bytes and packets sent."""
    fields = next(line for line in table.splitlines() if line.strip().startswith(f"{INTERFACE}:")).split(":")[1].split()
    return Traffic(int(fields[8]), int(fields[9]))
