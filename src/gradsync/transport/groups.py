"""Process groups of our own, so that nothing we send can meet what the user sends.

Two threads on one gloo group mix up collectives of equal size without an error; so every GradSync makes
its own groups and never issues on the user's.

Note [Groups outlive the interpreter]
    Gloo cannot abort a collective: the destructor of a group with one under way waits for the peer, up to
    the group's timeout. A rank that raises in the middle of a step would then hang at interpreter exit
    while the others wait for it. So each group carries one reference that is given back only by
    `Groups.close()`, after everything under way has ended; without it the process just exits.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist


class Groups(NamedTuple):
    """One gloo group for control, one group per device type for data, and who we are in them."""

    rank: int  # index in the group
    size: int
    ranks: tuple[int, ...]  # the members' global ranks, by index
    control: dist.ProcessGroup
    data: dict[str, dist.ProcessGroup]

    @property
    def all(self) -> list[dist.ProcessGroup]:
        return [self.control, *self.data.values()]

    def close(self) -> None:
        """Give the groups back. Only when nothing is under way on them: see [Groups outlive the interpreter]."""
        for group in self.all:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def on_host(self, device_type: str) -> bool:
        """Whether waiting for a collective on these tensors blocks the host (gloo) or a stream (nccl)."""
        return dist.get_backend(self.data[device_type]) != "nccl"


def make_groups(parent: dist.ProcessGroup, device_types: list[str], timeout: float) -> Groups:
    """Groups with the members of `parent`; every member must call this, others must not."""
    ranks = dist.get_process_group_ranks(parent)
    backends = {"control": "gloo"} | {kind: backend_for(parent, kind) for kind in device_types}
    made = {}
    for name, backend in backends.items():
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=timeout),
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"gradsync-{name}",
        )
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        made[name] = group
    control = made.pop("control")
    return Groups(dist.get_rank(parent), len(ranks), tuple(ranks), control, made)


def backend_for(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that `group` uses for tensors of this kind."""
    if device_type == "cpu":
        return "gloo"
    return group._get_backend(torch.device(device_type)).name().lower()


def group_timeout(group: dist.ProcessGroup) -> float:
    """The seconds after which `group` itself gives up."""
    kinds = group._device_types
    options = group._get_backend(kinds[0]).options
    return options._timeout.total_seconds()
