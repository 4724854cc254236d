"""The system calls that make a host: those for namespaces, which the package has too, and mounts."""

from __future__ import annotations

import ctypes
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

# From its file: by way of the package it would take the seconds that importing torch takes.
_FILE = Path(__file__).resolve().parents[2] / "src/gradsync/cli/demo/slow_link/namespaces.py"
_spec = spec_from_file_location("namespaces", _FILE)
assert _spec is not None
assert _spec.loader is not None
namespaces = module_from_spec(_spec)
_spec.loader.exec_module(namespaces)

HOST = namespaces.NEWNS | namespaces.NEWUTS | namespaces.NEWPID | namespaces.NEWNET
"""What a host has of its own: mounts, a name, processes and a network."""

SHARING = HOST & ~namespaces.NEWPID
"""The same without processes, for what must know their numbers: NVIDIA's multi-process service."""

_MNT_DETACH = 2
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x4_0000


def mount(kind: str, where: str) -> None:
    """A fresh file system of that kind."""
    _mount(kind, where, kind, 0)


def unmount(where: str) -> None:
    """Show again what was there before; what is bound elsewhere stays."""
    namespaces.check(namespaces.libc.umount2(where.encode(), _MNT_DETACH), f"umount {where}")


def bind(file: str, where: str) -> None:
    """Show `file` in the place of another."""
    _mount(file, where, None, _MS_BIND)


def keep_mounts_private() -> None:
    """What this process mounts from now on is seen in its own namespace only."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def _mount(source: str, where: str, kind: str | None, flags: int) -> None:
    text = kind.encode() if kind is not None else None
    code = namespaces.libc.mount(source.encode(), where.encode(), text, ctypes.c_ulong(flags), None)
    namespaces.check(code, f"mount {where}")
