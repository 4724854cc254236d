"""What ranks of a lab see and reach, without torch: these processes start in a moment."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

_PORT = 5000
_SECONDS = 10.0


def namespaces() -> dict[str, int]:
    """The identity of everything that a host has of its own."""
    own = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid", "mnt", "uts")}
    return own | {"shm": os.stat("/dev/shm").st_dev}


def interfaces() -> list[str]:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return [line.split(":")[0].strip() for line in lines]


def torchrun_says() -> dict[str, str]:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR GLOO_SOCKET_IFNAME OMP_NUM_THREADS"
    return {name: os.environ[name] for name in names.split()} | {"hostname": socket.gethostname()}


def greet_all() -> list[str]:
    """Every rank, one per host, tells every other its name over the link; the names that came."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with socket.create_server((f"10.0.0.{rank + 1}", _PORT)) as server:
        server.settimeout(_SECONDS)
        for other in range(size):
            if other != rank:
                with _connected(f"10.0.0.{other + 1}") as wire:
                    wire.sendall(socket.gethostname().encode())
        return sorted(_take(server) for _ in range(size - 1))


def knock_at_loopback() -> str:
    """Rank 0 listens on its loopback, and tells over the link when; the others try theirs."""
    if os.environ["RANK"] == "0":
        with socket.create_server(("127.0.0.1", _PORT)), socket.create_server(("10.0.0.1", _PORT + 1)) as door:
            door.settimeout(_SECONDS)
            return _take(door)
    with _connected("10.0.0.1", _PORT + 1) as wire:
        try:
            socket.create_connection(("127.0.0.1", _PORT), timeout=_SECONDS).close()
            answer = "reached"
        except ConnectionRefusedError:
            answer = "refused"
        wire.sendall(answer.encode())
    return answer


def fail_on(rank: int) -> None:
    print(f"rank {os.environ['RANK']} was here")
    if os.environ["RANK"] == str(rank):
        raise ArithmeticError("two and two is five")


def hang_on(rank: int) -> None:
    """With a child that hangs too."""
    if os.environ["RANK"] == str(rank):
        if os.fork() == 0:
            os.setsid()  # out of the group that is killed
        wait_for_ever()


def wait_for_ever() -> None:
    while True:
        signal.pause()


def _connected(address: str, port: int = _PORT) -> socket.socket:
    """The other side may not listen yet; every refusal takes a trip over the link."""
    for _ in range(100_000):
        try:
            return socket.create_connection((address, port), timeout=_SECONDS)
        except ConnectionRefusedError:
            pass
    raise TimeoutError(f"nobody listens at {address}:{port}")


def _take(server: socket.socket) -> str:
    wire, _ = server.accept()
    with wire:
        wire.settimeout(_SECONDS)
        return wire.recv(100).decode()
