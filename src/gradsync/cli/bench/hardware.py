"""The hardware that the numbers are measured on: processor, caches, memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from gradsync.transport import cgroups

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE_NBYTES = 32 * 2**20
_MEMINFO = Path("/proc/meminfo")


def machine(hosts: int, threads: int) -> dict[str, Any]:
    """Facts for a file of results; of rank 0's host, if there are several."""
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "last_level_cache": last_level_cache_nbytes(),
        "hosts": hosts,
        "threads_per_rank": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def last_level_cache_nbytes() -> int:
    """The largest cache that the first core has."""
    sizes = [_kibibytes(path.read_text()) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=0) or _UNKNOWN_CACHE_NBYTES


def free_memory_nbytes() -> int:
    """Return how much can be allocated here: what the machine has left, or the container if that is less."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = _kibibytes(line.split()[1])
            break
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = cgroups.free_memory_nbytes()
    return free if allowed is None else min(free, allowed)


def _kibibytes(text: str) -> int:
    return int(text.strip().removesuffix("K")) * 2**10


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
