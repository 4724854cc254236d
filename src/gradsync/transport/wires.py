"""The TCP connections of our own groups, so that what is under way on them can be ended.

Gloo cannot abort a collective, and one that fails while the interpreter shuts down takes the process with it
(a crash instead of an exit code). Cut wires make it fail at once, while there still is an interpreter.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable


def connections() -> frozenset[tuple[int, str]]:
    """This process's connected TCP sockets: descriptor, and the kernel's name of the socket."""
    found = set()
    for fd, name in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as wire:
            wire.getpeername()  # a socket that listens has no peer, and must not be touched
            if wire.type == socket.SOCK_STREAM and wire.family in (socket.AF_INET, socket.AF_INET6):
                found.add((fd, name))
    return frozenset(found)


def listeners() -> frozenset[tuple[str, int]]:
    """Where this process listens for TCP connections."""
    found = set()
    for fd, _ in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as door:
            if door.family in (socket.AF_INET, socket.AF_INET6) and _listens(door):
                found.add(door.getsockname()[:2])
    return frozenset(found)


def _listens(door: socket.socket) -> bool:
    return door.type == socket.SOCK_STREAM and bool(door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def cut(wires: Iterable[tuple[int, str]]) -> None:
    """End these connections, as far as they still exist."""
    for fd, _ in set(wires) & set(_sockets()):
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
