"""What ranks of a lab do: change a host's network, then see a doctor."""

from __future__ import annotations

import fcntl
import io
import os
import socket
import struct
from contextlib import redirect_stdout

from gradsync.cli.main import main

_SIOCSIFMTU = 0x8922


def see_doctor(arguments: list[str], odd_rank: int, mtu: int, interface: str) -> tuple[int, str]:
    """The exit code and what was printed; on one rank's host the MTU of its link is another."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if int(os.environ["RANK"]) == odd_rank:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFMTU, struct.pack("16si240x", b"eth0", mtu))
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = main(["doctor", *arguments])
    return code, printed.getvalue()
