"""The process that a host lives in: `python host_process.py NAME LAB_PID`, started by `lab.py`.

    lab ──stdin──▶ keeper ──parent of──▶ init, pid 1 of the host
                   ends when stdin ends  ends with the keeper,
                   or when the lab does  and the kernel ends every process of the host with it

So there is nothing to clean up: the namespaces have no name anywhere, and go when their processes do. On standard
output it says init's pid once the host is ready. /etc/hosts comes on standard input, up to an empty line.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from netlab import kernel

REFUSED = 77  # the exit code where the kernel allows no host, as of a test that cannot be run here


def main(name: str, lab: int) -> None:
    watched = os.pidfd_open(lab)  # before the new process namespace, in which the lab has no number
    hosts = "".join(iter(sys.stdin.readline, "\n"))
    kernel.namespaces.unshare(kernel.HOST)
    ready, told = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(ready)
        kernel.namespaces.die_with_parent(signal.SIGKILL)
        _furnish(name, hosts)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become ours, and nobody waits for them
        os.write(told, b"!")  # fails if the keeper ended before it could be watched
        os.close(told)
        while True:
            signal.pause()
    os.close(told)
    if os.read(ready, 1) == b"!":
        print(init, flush=True)
        _wait(watched)
        os.kill(init, signal.SIGKILL)
    _, status = os.waitpid(init, 0)  # returns when the last process of the host has ended
    sys.exit(REFUSED if os.waitstatus_to_exitcode(status) == REFUSED else 0)


def _furnish(name: str, hosts: str) -> None:
    """What tells a host from another one: its processes, its shared memory, its name and its neighbours'."""
    kernel.keep_mounts_private()
    kernel.mount("proc", "/proc")
    kernel.mount("tmpfs", "/dev/shm")
    socket.sethostname(name)
    shown = Path("/dev/shm/hosts")
    shown.write_text(hosts)
    kernel.bind(str(shown), "/etc/hosts")
    shown.unlink()
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        # Its neighbour discovery would be counted as traffic.
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def _wait(lab: int) -> None:
    """Not by the pipe alone: a fork of the lab's process would hold its other end open."""
    poll = select.poll()
    for fd in (0, lab):
        poll.register(fd, select.POLLIN)
    with contextlib.suppress(KeyboardInterrupt):
        poll.poll()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except OSError as error:
        print(f"no host here: {error}", file=sys.stderr)
        os._exit(REFUSED)
