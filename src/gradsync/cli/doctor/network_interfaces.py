"""The network interfaces of this host, as the kernel shows them under /sys."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from gradsync.cli.doctor.rank_facts import Nic
from gradsync.launch.interface import interface_addresses

_SIOCGIFNETMASK, _SIOCGIFMTU = 0x891B, 0x8921
_SYS = Path("/sys/class/net")


def nics() -> list[Nic]:
    """Every interface that exists."""
    try:
        addresses = interface_addresses()
        names = sorted(name for _, name in socket.if_nameindex())
    except OSError:
        return []
    return [_nic(name, next((each for nic, each in addresses if nic == name), "")) for name in names]


def infiniband() -> list[str]:
    """The ports that are up, as in "mlx5_0:1"."""
    states = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return sorted(f"{path.parts[-4]}:{path.parts[-2]}" for path in states if "ACTIVE" in _text(path))


def _nic(name: str, address: str) -> Nic:
    folder = _SYS / name
    return Nic(
        name=name,
        address=address,
        prefix=_prefix(name) if address and ":" not in address else 0,
        mtu=_mtu(name),
        mbit=_number(folder / "speed"),
        numa=_number(folder / "device" / "numa_node"),
        up=_text(folder / "operstate") in ("up", "unknown"),
        virtual="/virtual/" in os.path.realpath(folder),
    )


def _prefix(name: str) -> int:
    """Bits of the network that its first IPv4 address is in."""
    return int.from_bytes(_asked(_SIOCGIFNETMASK, name)[20:24], "big").bit_count()


def _mtu(name: str) -> int:
    """The MTU by a call, not by /sys, which in a network namespace may show another's interfaces."""
    return int(struct.unpack_from("i", _asked(_SIOCGIFMTU, name), 16)[0])


def _asked(request: int, name: str) -> bytes:
    """The kernel's answer about an interface; zeros if it has none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            return fcntl.ioctl(any_socket, request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return bytes(256)


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() else -1


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # a speed of an interface that is down is an error of its own
        return ""
