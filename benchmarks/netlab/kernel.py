"""The four system calls that Python 3.11 has no name for."""

from __future__ import annotations

import ctypes
import os

NEWNS, NEWUTS, NEWPID, NEWNET = 0x0002_0000, 0x0400_0000, 0x2000_0000, 0x4000_0000
HOST = NEWNS | NEWUTS | NEWPID | NEWNET
"""What a host has of its own: mounts, a name, processes and a network."""

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """New namespaces for this process (its children, for processes)."""
    _check(_libc.unshare(flags), "unshare")


def join(fd: int, flags: int) -> None:
    """Enter the namespaces of a process, given by its pidfd; only this thread, where there are several."""
    _check(_libc.setns(fd, flags), "setns")


def mount(kind: str, where: str) -> None:
    """A fresh file system of that kind."""
    _mount(kind, where, kind, 0)


def bind(file: str, where: str) -> None:
    """Show `file` in the place of another."""
    _mount(file, where, None, _MS_BIND)


def keep_mounts_private() -> None:
    """What this process mounts from now on is seen in its own namespace only."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def die_with_parent(signal: int) -> None:
    """Be sent `signal` when the parent ends, however it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl")


def _mount(source: str, where: str, kind: str | None, flags: int) -> None:
    text = kind.encode() if kind is not None else None
    _check(_libc.mount(source.encode(), where.encode(), text, ctypes.c_ulong(flags), None), f"mount {where}")


def _check(code: int, call: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
