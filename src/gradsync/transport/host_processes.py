"""The processes of this host's ranks: what the kernel says of them, and whose they are, as far as we have met them.

`gs.init`, `gs.spawn` and every meeting note whom they saw. A later meeting (a second model, a plan that changes) then
need not wait for the record of a rank whose process has ended.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist


class Process(NamedTuple):
    """A process as the kernel saw it just now."""

    state: str  # R: running, S and D: waiting, T: stopped, Z: ended
    cpu_ticks: int  # of all its threads so far
    begun: int  # when it started: another process of the same number began later

    @property
    def ended(self) -> bool:
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def look_at(pid: int) -> Process | None:
    """The process of this number; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in parentheses and may hold anything.
    fields = text[text.rindex(")") + 2 :].split()
    return Process(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]))


def is_gone(pid: int) -> bool:
    """Return whether there is no such process any more, or only what its parent has yet to read of it."""
    process = look_at(pid)
    return process is None or process.ended


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[int, int]]] = weakref.WeakKeyDictionary()


def remember(rank: int, pid: int) -> None:
    """Remember the process of that global rank of the default group: it was just seen alive."""
    world, process = dist.group.WORLD, look_at(pid)
    if world is not None and process is not None:
        _known.setdefault(world, {})[rank] = pid, process.begun


def ended(rank: int) -> bool:
    """Return whether the process of that global rank is known to have ended; False also means: cannot tell."""
    world = dist.group.WORLD
    if world is None or (known := _known.get(world, {}).get(rank)) is None:
        return False
    pid, begun = known
    process = look_at(pid)
    return process is None or process.ended or process.begun != begun
