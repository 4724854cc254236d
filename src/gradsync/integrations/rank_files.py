"""A rank's state as a file of its own, in a checkpoint folder that a framework makes.

    checkpoint-40/model.safetensors            what all ranks have alike: the framework's, from rank 0
    checkpoint-40/gradsync-rank0.safetensors   what only rank 0 has
    checkpoint-40/gradsync-rank1.safetensors   what only rank 1 has

Frameworks keep what rank 0 has, and unpickle it. Residuals differ by rank, and safetensors cannot run code.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from gradsync import files
from gradsync.engine.handle import GradSync
from gradsync.errors import GradSyncError


def save(sync: GradSync, folder: Path, name: str = "gradsync", rank: int | None = None) -> None:
    """Write this rank's file; every rank does. `rank`: where it is not that of the process group."""
    if not sync.replicas_equal:
        raise GradSyncError(
            f"the replicas differ between two averages of {sync.plan.pace!r}, and a checkpoint keeps rank 0's weights: "
            "call sync.drain() on every rank before you save, or save while sync.replicas_equal is True"
        )
    rank, size = dist.get_rank() if rank is None else rank, dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{name}-rank{rank}.tmp"
    files.check_writable(temporary)
    save_file(sync.state_dict(), temporary)
    temporary.replace(folder / f"{name}-rank{rank}.safetensors")  # never a half-written file
    if rank == 0:
        for old, file in _files(folder, name):
            if old >= size:  # of an earlier run with more ranks, in the same folder
                file.unlink(missing_ok=True)


def load(sync: GradSync, folder: Path, name: str = "gradsync") -> None:
    """Continue from the files there; every rank calls this, and reads those of the old ranks that it takes on."""
    rank = dist.get_rank()
    state = read(folder, rank, dist.get_world_size(), name)
    try:
        sync.load_state_dict(state)
    except ValueError:
        if state:
            raise
        # No rank has a file: others find the same.
        if rank == 0:
            warnings.warn(
                f"{folder} has no {name}-rank*.safetensors, so it was saved without gradsync: weights and optimizer go "
                "on from there, and the plan begins anew",
                stacklevel=2,
            )


def read(folder: Path, rank: int, size: int, name: str = "gradsync") -> dict[str, torch.Tensor]:
    """Return what the files of those old ranks hold that this one of `size` takes on; nothing if there are none."""
    state: dict[str, torch.Tensor] = {}
    for old, file in _files(folder, name):
        if old % size == rank:
            files.check_regular(file)
            state |= load_file(file)
    return state


def _files(folder: Path, name: str) -> Iterator[tuple[int, Path]]:
    for file in sorted(folder.glob(f"{name}-rank*.safetensors")):
        if found := re.fullmatch(re.escape(name) + r"-rank(\d+)\.safetensors", file.name):
            yield int(found[1]), file
