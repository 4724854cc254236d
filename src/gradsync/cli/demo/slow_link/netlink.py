"""Requests to the kernel about interfaces, addresses and shapers, in the words of `rtnetlink(7)`.

message     length, kind, flags, number, port │ a fixed struct of its kind │ attribute │ attribute │ ...
attribute   length, kind │ value, which may be attributes again │ zeros up to a multiple of 4 bytes
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

NEWLINK, NEWADDR, NEWQDISC, GETQDISC = 16, 20, 36, 38
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _EXCLUSIVE, _CREATE, _DUMP = 0x1, 0x4, 0x200, 0x400, 0x300

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_CODE = struct.Struct("=i")
_NUMBER = 1  # one request at a time
_ANSWER_NBYTES = 2**16
_TIMEOUT_S = 10.0


class Netlink:
    """A socket to the kernel, for the network that the thread which makes it is in. A context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.settimeout(_TIMEOUT_S)

    def __enter__(self) -> Netlink:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def create(self, kind: int, body: bytes) -> None:
        """Make something that is not there yet."""
        self._ask(kind, _ACK | _CREATE | _EXCLUSIVE, body)

    def change(self, kind: int, body: bytes) -> None:
        """Change something that is there."""
        self._ask(kind, _ACK, body)

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """The bodies of all that there is of a kind."""
        return self._ask(kind, _DUMP, body)

    def _ask(self, kind: int, flags: int, body: bytes) -> list[bytes]:
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, _NUMBER, 0) + body)
        bodies: list[bytes] = []
        while True:
            for answer, content in _messages(self._socket.recv(_ANSWER_NBYTES)):
                if answer == _DONE:
                    return bodies
                if answer == _ERROR:
                    (code,) = _CODE.unpack_from(content)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return bodies
                bodies.append(content)


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded.

    >>> attribute(3, b"lo").hex(" ", 4)
    '06000300 6c6f0000'
    """
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: bytes) -> dict[int, bytes]:
    """Values by kind.

    >>> attributes(attribute(3, b"lo") + attribute(1, b""))
    {3: b'lo', 1: b''}
    """
    found = {}
    while data:
        length, kind = _ATTRIBUTE.unpack_from(data)
        found[kind] = data[_ATTRIBUTE.size : length]
        data = data[length + -length % 4 :]
    return found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[length + -length % 4 :]
