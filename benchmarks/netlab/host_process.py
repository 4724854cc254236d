"""The process that a host lives in: `python host_process.py NAME LAB_PID [share]`, started by `lab.py`.

    lab ──stdin──▶ keeper ──parent of──▶ init, pid 1 of the host
                   ends when stdin ends  ends with the keeper,
                   or when the lab does  and the kernel ends every process of the host with it

So there is nothing to clean up: the namespaces have no name anywhere, and go when their processes do. On standard
output it says init's pid once the host is ready. /etc/hosts comes on standard input, up to an empty line.

With `share` the host has neither processes nor /dev/shm of its own, and the kernel ends nothing. Then whoever is in its
network is its inhabitant: the keeper kills them all, and init does, should the keeper have been killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from netlab import kernel

_PATIENCE_S, _LOOK_S = 30.0, 0.01
REFUSED = 77  # the exit code where the kernel allows no host, as of a test that cannot be run here


def main(name: str, lab: int, share: bool) -> None:
    watched = os.pidfd_open(lab)  # before the new process namespace, in which the lab has no number
    hosts = "".join(iter(sys.stdin.readline, "\n"))
    outside = _network()
    kernel.namespaces.unshare(kernel.SHARING if share else kernel.HOST)
    assert _network() != outside, "everybody out there would be taken for an inhabitant"
    ready, told = os.pipe()
    keeper = os.pidfd_open(os.getpid())
    init = os.fork()
    if init == 0:
        os.close(ready)
        if not share:
            kernel.namespaces.die_with_parent(signal.SIGKILL)
        _furnish(name, hosts, share)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become ours, and nobody waits for them
        os.write(told, b"!")  # fails if the keeper ended before it could be watched
        os.close(told)
        _wait([keeper])
        _end_inhabitants()
        os._exit(0)
    os.close(told)
    if os.read(ready, 1) == b"!":
        print(init, flush=True)
        _wait([0, watched])  # not by the pipe alone: a fork of the lab's process would hold its other end open
        if share:
            _end_inhabitants()
        os.kill(init, signal.SIGKILL)
    _, status = os.waitpid(init, 0)  # returns when the last process of the host has ended
    sys.exit(REFUSED if os.waitstatus_to_exitcode(status) == REFUSED else 0)


def _end_inhabitants() -> None:
    """Kill whoever is in our network but us, until nobody is; a process that is just being born is seen next time."""
    network, deadline = _network(), time.monotonic() + _PATIENCE_S
    while (found := _others_in(network)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _network() -> int:
    return os.stat("/proc/self/ns/net").st_ino


def _others_in(network: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if int(folder.name) != os.getpid() and os.stat(folder / "ns/net").st_ino == network:
                found.append(int(folder.name))
    return found


def _furnish(name: str, hosts: str, share: bool) -> None:
    """What tells a host from another one: its processes, its shared memory, its name and its neighbours'."""
    kernel.keep_mounts_private()
    if not share:
        kernel.mount("proc", "/proc")
    kernel.mount("tmpfs", "/dev/shm")
    socket.sethostname(name)
    shown = Path("/dev/shm/hosts")
    shown.write_text(hosts)
    kernel.bind(str(shown), "/etc/hosts")
    shown.unlink()
    if share:
        kernel.unmount("/dev/shm")  # only /etc/hosts needed it
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        # Its neighbour discovery would be counted as traffic.
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def _wait(files: list[int]) -> None:
    """Until one of them has something to read, or has ended."""
    poll = select.poll()
    for fd in files:
        poll.register(fd, select.POLLIN)
    with contextlib.suppress(KeyboardInterrupt):
        poll.poll()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["share"])
    except OSError as error:
        print(f"no host here: {error}", file=sys.stderr)
        os._exit(REFUSED)
