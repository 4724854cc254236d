"""Files that somebody points us at: opened without waiting, regular ones only, and never read without a bound.

A pipe without a writer, a terminal or an endless device would hold whoever opens or reads it for ever. Links to
regular files are followed. What is refused is an OSError, like any other file that cannot be read.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

MOST_NBYTES = 64 << 20  # of a file that is read whole

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_REGULAR = frozenset({stat.S_IFREG})
_REGULAR_OR_DEVICE = frozenset({stat.S_IFREG, stat.S_IFCHR})


def open_to_read(path: str | Path) -> BinaryIO:
    """A regular file, from its beginning."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def read(path: str | Path, most_nbytes: int = MOST_NBYTES) -> bytes:
    """Return all that a regular file holds; raise OSError if that is too much."""
    with open_to_read(path) as file:
        content = file.read(most_nbytes + 1)
    if len(content) > most_nbytes:
        raise OSError(errno.EFBIG, f"it holds more than {most_nbytes >> 20} MiB", str(path))
    return content


def beginning(path: str | Path, most_nbytes: int) -> bytes:
    """The first bytes of a regular file."""
    with open_to_read(path) as file:
        return file.read(most_nbytes)


def write(path: str | Path, text: str) -> None:
    """A file, new or written over, with this text in UTF-8; or to a device like /dev/null.

    Who reads it meanwhile, another rank say, sees the old text or the new one, never half of either.
    """
    content = text.encode("utf-8")
    there = Path(os.path.realpath(path))  # where the path is a link, the link stays
    mode = 0o666 & ~_umask()
    if there.exists():
        fd = _open(path, os.O_WRONLY, allowed=_REGULAR_OR_DEVICE)
        with os.fdopen(fd, "wb") as file:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                file.write(content)
                return
    try:
        beside, name = tempfile.mkstemp(prefix=f".{there.name[:100]}.", dir=there.parent)
    except PermissionError:  # a file that one may write in a folder that one may not
        with open(_open(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(content)
        return
    try:
        with os.fdopen(beside, "wb") as file:
            os.fchmod(beside, mode)
            file.write(content)
        os.replace(name, there)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    """Return the bits that this process takes from the rights of new files; `os.umask` would tell by setting them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def open_to_write(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a regular file that is made if there is none; nothing of it is lost yet."""
    return _open(path, flags | os.O_CREAT, mode)


def check_writable(path: Path) -> None:
    """Raise OSError if `write` could not, before work is done that ends with it. Leaves no file behind."""
    try:
        existing = path.stat().st_mode
    except FileNotFoundError:
        there = os.path.realpath(path)
        os.close(os.open(there, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        os.unlink(there)
        return
    _refuse(path, existing, _REGULAR_OR_DEVICE)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_regular(path: str | Path) -> None:
    """Raise OSError if it cannot be read, or is none, before somebody else's reader gets it."""
    open_to_read(path).close()


def _open(path: str | Path, flags: int, mode: int = 0o666, allowed: frozenset[int] = _REGULAR) -> int:
    # O_NONBLOCK: whatever it is, opening it does not wait; to a regular file it means nothing.
    try:
        fd = os.open(os.fspath(path), flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            _refuse(path, os.stat(path).st_mode, allowed)
        raise
    try:
        _refuse(path, os.fstat(fd).st_mode, allowed)
    except OSError:
        os.close(fd)
        raise
    return fd


def _refuse(path: str | Path, mode: int, allowed: frozenset[int]) -> None:
    if stat.S_IFMT(mode) not in allowed:
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
