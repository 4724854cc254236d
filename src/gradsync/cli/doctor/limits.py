"""The limits that the machine or container sets this process: memory to share and lock, files, processors, a folder."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path


def shared_memory() -> tuple[int, int]:
    """Bytes of /dev/shm, and how many are free; -1 where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return -1, -1
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def has_memfd() -> bool:
    """Return whether memory can be shared without a name, as gradsync does it."""
    try:
        os.close(os.memfd_create("gradsync-doctor"))
    except (OSError, AttributeError):
        return False
    return True


def locked_memory() -> int:
    """Bytes that may be locked; -1 without limit."""
    return _soft(resource.RLIMIT_MEMLOCK)


def limit_of_files() -> int:
    """Files and sockets that may be open; -1 without limit."""
    return _soft(resource.RLIMIT_NOFILE)


def usable_cpus() -> float:
    """The processors that affinity and the quota of the container leave."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return min(cores, quota) if quota > 0 else cores


def trace_folder(name: str) -> tuple[str, int]:
    """Return why nothing can be written there, "" if it can; and the bytes that are free, -1 if not known."""
    if not name:
        return "", -1
    folder = Path(name)
    existing = next((each for each in (folder, *folder.absolute().parents) if each.exists()), Path("/"))
    try:
        free_nbytes = shutil.disk_usage(existing).free
        if not existing.is_dir():
            return f"{existing} is a file", free_nbytes
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return error.strerror or str(error), -1
    return "", free_nbytes


def _soft(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _quota(mount: Path, own: Path) -> float:
    """Cores by the cgroup's quota, version 2 or 1; 0 without one. A group's parents limit it too."""
    found = [_quota_2(folder) for folder in _folders(mount, own, "")]
    found += [_quota_1(folder) for folder in _folders(mount / "cpu", own, "cpu")]
    return min((each for each in found if each > 0), default=0.0)


def _folders(mount: Path, own: Path, controller: str) -> list[Path]:
    """This process's group and those around it; in a container its own is the mount itself."""
    try:
        rows = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        rows = []
    paths = [row[2] for row in rows if len(row) == 3 and controller in row[1].split(",")]
    inner = [mount / path.lstrip("/") for path in paths]
    around = [parent for folder in inner for parent in (folder, *folder.parents) if mount in (parent, *parent.parents)]
    return list(dict.fromkeys([mount, *around]))


def _quota_2(folder: Path) -> float:
    try:
        allowed, period = (folder / "cpu.max").read_text().split()
        return 0.0 if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def _quota_1(folder: Path) -> float:
    try:
        allowed = int((folder / "cpu.cfs_quota_us").read_text())
        return max(0.0, allowed / int((folder / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0
