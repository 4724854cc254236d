"""Which host this process is on, as the user declared it or as the kernel tells."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_declared: str | None = None


def declare_host(name: str | None) -> None:
    """Make this process count as being on host `name`; None goes back to what the kernel says."""
    global _declared
    _declared = name


def host_identity() -> str:
    """Equal in two processes iff they may share a host: the same boot, the same pid and network namespaces.

    Containers count as hosts of their own, and so do network namespaces: what is meant to go over a slow link
    does not take a short cut through memory. Whether they do share one shows when they open each other's memory.
    """
    return kernel_identity() if _declared is None else f"declared:{_declared}"


def kernel_identity() -> str:
    """The same, but only as the kernel tells: in two such processes a number means the same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
        return f"{boot}:{spaces}"
    except OSError:
        return f"name:{socket.gethostname()}"
