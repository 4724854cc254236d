"""The network interface that gloo uses on this host, and the address by which the others reach it.

Left alone, gloo binds to whatever the host's own name resolves to. On Debian and Ubuntu that is
127.0.1.1, by /etc/hosts, and a group across hosts then hangs in connect.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFCONF = 0x8912
_IFREQ = 40  # sizeof(struct ifreq) on 64-bit Linux
_MAX_ADDRESSES = 1024


@dataclass(frozen=True)
class Endpoint:
    """The interface on which gloo listens, and its address. `interface` is None where gloo goes by the host's name."""

    interface: str | None
    address: str

    @property
    def loopback(self) -> bool:
        return is_loopback(self.address)

    def __str__(self) -> str:
        return f"{self.interface or 'the address of the host name'} ({self.address})"


def is_loopback(address: str) -> bool:
    """Return whether packets to this literal address stay in the kernel.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def network_identity() -> str:
    """A text that is equal in two processes iff loopback connects them: one kernel and one network namespace.

    A host declared with `init(host=...)` does not enter: it decides which transport is used, not where
    packets can go.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"name:{socket.gethostname()}"


def named_endpoint(names: str) -> Endpoint:
    """The endpoint of a `GLOO_SOCKET_IFNAME` that the user set; it may list several, by commas."""
    known = interface_addresses()
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in (interface for interface, _ in known):
            have = ", ".join(f"{interface} ({address})" for interface, address in known)
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={names} names {name!r}, but the interfaces with an address are {have}"
            )
    firsts = [next(address for interface, address in known if interface == name) for name in chosen]
    return Endpoint(names, next((address for address in firsts if is_loopback(address)), firsts[0]))


def loopback_endpoint() -> Endpoint | None:
    """The interface that has 127.0.0.1; None where loopback is down."""
    name = _interface_of("127.0.0.1")
    return None if name is None else Endpoint(name, "127.0.0.1")


def endpoint_towards(remote: str) -> Endpoint:
    """The interface from which packets to `remote` leave, by its address."""
    address = local_address(remote)
    name = None if address is None else _interface_of(address)
    # An address of its own on `lo` (hosts that speak BGP have that) cannot be asked for by interface:
    # gloo would take 127.0.0.1, the first one there.
    if address is None or name is None or (name == _interface_of("127.0.0.1") and not is_loopback(address)):
        return _endpoint_of_host_name()
    return Endpoint(name, address)


def local_address(remote: str) -> str | None:
    """The source address of packets to `remote`. Connecting UDP asks the routes and sends nothing."""
    try:
        candidates = socket.getaddrinfo(remote, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(where)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def interface_addresses() -> list[tuple[str, str]]:
    """Every (interface, address) of this network namespace, IPv4 first."""
    return _ipv4_addresses() + _ipv6_addresses()


def _ipv4_addresses() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_IFREQ * _MAX_ADDRESSES))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, request)
    nbytes = struct.unpack("iP", answer)[0]
    entries = [buffer[start : start + _IFREQ].tobytes() for start in range(0, nbytes, _IFREQ)]
    # 16 bytes name (`eth0:1` for a labelled second address), then family, port and the address.
    return [(e[:16].rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(e[20:24])) for e in entries]


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().split("\n")
    except OSError:
        return []
    fields = [line.split() for line in lines if line]
    return [(parts[5], str(ipaddress.IPv6Address(int(parts[0], 16)))) for parts in fields]


def _interface_of(address: str) -> str | None:
    plain = address.partition("%")[0]
    exact = next((name for name, known in interface_addresses() if known == plain), None)
    if exact is None and is_loopback(plain):
        # All of 127.0.0.0/8 is on loopback, though only 127.0.0.1 is listed.
        return next((name for name, known in interface_addresses() if known == "127.0.0.1"), None)
    return exact


def _endpoint_of_host_name() -> Endpoint:
    """Return what gloo takes by itself: the host name's address, else loopback."""
    try:
        return Endpoint(None, str(socket.getaddrinfo(socket.gethostname(), 0)[0][4][0]))
    except OSError:
        return Endpoint(None, "127.0.0.1")
