"""The TCP connections of our own groups, so that what is under way on them can be ended.

Gloo cannot abort a collective, and one that fails while the interpreter shuts down takes the process with it
(a crash instead of an exit code). Cut connections make it fail at once, while there still is an interpreter.

What each of our TCP connections has carried so far, as the kernel counts it.

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


def connections() -> frozenset[tuple[int, str]]:
    """Return this process's connected TCP sockets: descriptor, and the kernel's name of the socket."""
    found = set()
    for fd, name in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as wire:
            wire.getpeername()  # a socket that listens has no peer, and must not be touched
            if wire.type == socket.SOCK_STREAM and wire.family in (socket.AF_INET, socket.AF_INET6):
                found.add((fd, name))
    return frozenset(found)


def listeners() -> frozenset[tuple[str, int]]:
    """The addresses where this process listens for TCP connections."""
    found = set()
    for fd, _ in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as door:
            if door.family in (socket.AF_INET, socket.AF_INET6) and _listens(door):
                found.add(door.getsockname()[:2])
    return frozenset(found)


def _listens(door: socket.socket) -> bool:
    return door.type == socket.SOCK_STREAM and bool(door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def cut(sockets: Iterable[tuple[int, str]]) -> None:
    """End these connections, as far as they still exist."""
    for fd, _ in set(sockets) & set(_sockets()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as wire:
            wire.shutdown(socket.SHUT_RDWR)


def _sockets() -> list[tuple[int, str]]:
    found = []
    # A descriptor may close while we look, and elsewhere than on Linux there is nothing to see.
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{entry}")
                if name.startswith("socket:"):
                    found.append((int(entry), name))
    return found


# Offsets in Linux' struct tcp_info, which only ever grows at its end.
_UNACKED, _RTT_US, _TOTAL_RETRANS, _BYTES_ACKED, _BUSY_US = 24, 68, 100, 120, 168
_NEEDED_NBYTES = 176


class SocketEnd(NamedTuple):
    """One side of a connection."""

    address: str
    port: int


class SocketReading(NamedTuple):
    """One connection since it was made."""

    mine: SocketEnd
    theirs: SocketEnd
    nbytes: int  # acknowledged by the other side
    busy_s: float
    rtt_s: float
    retransmits: int
    in_flight: int = 0  # packets that the other side has not acknowledged yet


def read_sockets(sockets: Iterable[tuple[int, str]]) -> dict[str, SocketReading]:
    """A reading of each socket that still exists, by its kernel's name; nothing where the kernel does not tell."""
    readings = {}
    for fd, name in sockets:
        with contextlib.suppress(OSError, struct.error):
            if os.readlink(f"/proc/self/fd/{fd}") == name:
                with socket.socket(fileno=os.dup(fd)) as wire:
                    readings[name] = _read(wire)
    return readings


def _read(wire: socket.socket) -> SocketReading:
    info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _NEEDED_NBYTES:
        raise OSError("an old kernel")
    (rtt_us,) = struct.unpack_from("<I", info, _RTT_US)
    (in_flight,) = struct.unpack_from("<I", info, _UNACKED)
    (retransmits,) = struct.unpack_from("<I", info, _TOTAL_RETRANS)
    (nbytes,) = struct.unpack_from("<Q", info, _BYTES_ACKED)
    (busy_us,) = struct.unpack_from("<Q", info, _BUSY_US)
    mine, theirs = wire.getsockname(), wire.getpeername()
    ends = SocketEnd(*mine[:2]), SocketEnd(*theirs[:2])
    return SocketReading(*ends, nbytes, busy_us / 1e6, rtt_us / 1e6, retransmits, in_flight)
