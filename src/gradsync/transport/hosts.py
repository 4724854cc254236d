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
    """Equal in two processes iff they may see each other's processes through /proc.

    The boot id tells machines apart, the pid namespace tells containers apart.
    """
    if _declared is not None:
        return f"declared:{_declared}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"name:{socket.gethostname()}"
