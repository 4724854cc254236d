"""What each of our TCP connections has carried so far, as the kernel counts it.

A collective takes as long as its slowest link, and looks alike on every rank. The kernel knows better: a connection is
busy while something is left to send, so bytes per busy second is what its own link gives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

# Offsets in Linux' struct tcp_info, which only ever grows at its end.
_RTT_US, _TOTAL_RETRANS, _BYTES_ACKED, _BUSY_US = 68, 100, 120, 168
_NEEDED_NBYTES = 176


class End(NamedTuple):
    """One side of a connection."""

    address: str
    port: int


class Reading(NamedTuple):
    """One connection since it was made."""

    mine: End
    theirs: End
    nbytes: int  # acknowledged by the other side
    busy_s: float
    rtt_s: float
    retransmits: int


def read_meters(wires: Iterable[tuple[int, str]]) -> dict[str, Reading]:
    """Of those that still exist, by the kernel's name of the socket; nothing where the kernel does not tell."""
    readings = {}
    for fd, name in wires:
        with contextlib.suppress(OSError, struct.error):
            if os.readlink(f"/proc/self/fd/{fd}") == name:
                with socket.socket(fileno=os.dup(fd)) as wire:
                    readings[name] = _read(wire)
    return readings


def _read(wire: socket.socket) -> Reading:
    info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _NEEDED_NBYTES:
        raise OSError("an old kernel")
    (rtt_us,) = struct.unpack_from("<I", info, _RTT_US)
    (retransmits,) = struct.unpack_from("<I", info, _TOTAL_RETRANS)
    (nbytes,) = struct.unpack_from("<Q", info, _BYTES_ACKED)
    (busy_us,) = struct.unpack_from("<Q", info, _BUSY_US)
    mine, theirs = wire.getsockname(), wire.getpeername()
    return Reading(End(*mine[:2]), End(*theirs[:2]), nbytes, busy_us / 1e6, rtt_us / 1e6, retransmits)
