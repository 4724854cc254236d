"""The limits that the kernel's control groups, version 1 or 2, set this process: a container's, a batch system's.

A group lies within others, and each of them may have a limit; the tightest counts. Where they are is written in
`/proc/self/cgroup` (which groups) and `/proc/self/mountinfo` (where one can look at them):

    /proc/self/cgroup       0::/job/step                       2: all controllers in one tree
                            5:memory:/job/step                 1: a tree for each
    /proc/self/mountinfo    … /job /sys/fs/cgroup … - cgroup2  of the tree, /job and what is in it can be seen there
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_PROC = Path("/proc/self")


class _GroupFiles(NamedTuple):
    """Files of a version's memory controller, and the row of memory.stat that counts what can be taken back."""

    limit: str
    used: str
    reclaimable: str


_VERSIONS = {
    1: _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _GroupFiles("memory.max", "memory.current", "inactive_file"),
}


def free_memory_nbytes(proc: Path = _PROC) -> int | None:
    """Return the bytes that the tightest group still lets this process have; None without a limit."""
    found = [_free(folder, _VERSIONS[version]) for version, folder in folders("memory", proc)]
    return min((free for free in found if free is not None), default=None)


def folders(controller: str, proc: Path = _PROC) -> list[tuple[int, Path]]:
    """Version and folder of this process's group, and of those around it, as far as they can be seen."""
    own = _own_groups(controller, proc)
    found = []
    for version, root, point in _mounts(controller, proc):
        if version in own:
            inner = _below(root, own[version])
            around = [point.joinpath(*inner[:depth]) for depth in range(len(inner), -1, -1)]
            found += [(version, folder) for folder in around]
    return found


def _own_groups(controller: str, proc: Path) -> dict[int, PurePosixPath]:
    """Return this process's group in the tree of each version."""
    own = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "" and path:
            own[2] = PurePosixPath(path)
        elif controller in controllers.split(","):
            own[1] = PurePosixPath(path)
    return own


def _mounts(controller: str, proc: Path) -> Iterator[tuple[int, PurePosixPath, Path]]:
    """Version, the group that is at the top, and where."""
    for line in _lines(proc / "mountinfo"):
        left, _, right = line.partition(" - ")
        place, kind = left.split(), right.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        root, point = PurePosixPath(_plain(place[3])), Path(_plain(place[4]))
        if kind[0] == "cgroup2":
            yield 2, root, point
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, root, point


def _below(root: PurePosixPath, path: PurePosixPath) -> tuple[str, ...]:
    """The way from the group that is mounted to ours; nothing if ours cannot be seen from there."""
    try:
        inner = path.relative_to(root).parts
    except ValueError:
        return ()
    return () if ".." in inner else inner


def _free(folder: Path, names: _GroupFiles) -> int | None:
    """Return what a group's limit leaves; memory for files can be taken back. None if it has no limit, or is absent."""
    try:
        limit, used = int((folder / names.limit).read_text()), int((folder / names.used).read_text())
        rows = dict(line.split() for line in _lines(folder / "memory.stat"))
        return max(0, limit - used + int(rows.get(names.reclaimable, 0)))
    except (OSError, ValueError):  # version 2 says "max"
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _plain(word: str) -> str:
    """A path as the kernel writes it: spaces and the like as octal numbers.

    >>> _plain(r"/a\\040b")
    '/a b'
    """
    return os.fsdecode(word.encode("utf-8").decode("unicode_escape").encode("latin-1"))
