"""Namespaces of Linux, by the system calls that Python 3.11 has no name for.

To make a network takes two capabilities. Whoever lacks them has them in a user namespace of its own, and only a process
of one thread can make one, so this file, which imports next to nothing, is also a program:

    gradsync demo, ordinary ──▶ python namespaces.py COMMAND: new user namespace, becomes ──▶ COMMAND, root in there
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from pathlib import Path

NEWNS, NEWUTS, NEWUSER, NEWPID, NEWNET = 0x0002_0000, 0x0400_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_PR_SET_PDEATHSIG = 1
_SETTINGS = {  # that forbid user namespaces: the name of a setting, the value that does, and one that does not
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "10000"),
}
libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """New namespaces for this process (a network: for this thread; processes: for its children)."""
    check(libc.unshare(flags), "unshare")


def join(pid: int, flags: int) -> None:
    """Enter namespaces of another process; only this thread, where there are several."""
    pidfd = os.pidfd_open(pid)
    try:
        check(libc.setns(pidfd, flags), "setns")
    finally:
        os.close(pidfd)


def die_with_parent(number: int) -> None:
    """Be sent this signal when the parent ends, however it ends."""
    check(libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def check(code: int, call: str) -> None:
    """Raise what the C library says went wrong."""
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def missing_capabilities() -> list[str]:
    """Return the names of the capabilities that this process lacks to make networks."""
    status = Path("/proc/self/status").read_text()
    held = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    return [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]


def enter_user_namespace() -> None:
    """Be root in a user namespace of its own, and nobody else outside than before."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")  # the kernel wants it before an ordinary user maps a group
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def explain(error: OSError, settings: Path = Path("/proc/sys")) -> str:
    """Say why there can be no namespace, and what to do."""
    for name, (forbids, allows) in _SETTINGS.items():
        file = settings / name.replace(".", "/")
        if file.exists() and file.read_text().strip() == forbids:
            return (
                f"user namespaces are switched off here ({name} = {forbids}): "
                f"sudo sysctl {name}={allows}, or run this as root"
            )
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSPC):
        return (
            f"the kernel refuses a network of its own to this process ({error.strerror}): run this as root, and in a "
            "container with --cap-add SYS_ADMIN --cap-add NET_ADMIN"
        )
    return f"this kernel cannot make a network ({error.strerror}): run this on another Linux"


def main(command: list[str]) -> None:
    """Become the command, as root of a new user namespace; exit code 2 and a sentence where that cannot be."""
    try:
        enter_user_namespace()
    except OSError as error:
        print(f"gradsync demo: there can be no slow link here, {explain(error)}", file=sys.stderr)
        sys.exit(2)
    die_with_parent(signal.SIGTERM)  # after the new namespace: a change of rights undoes it
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
