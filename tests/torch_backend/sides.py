"""The same call on a gloo group and on a gradsync group of the same ranks, side by side."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import gradsync.backend  # registers itself

assert gradsync.backend.GradsyncGroup


def gradsync_group(seconds: float = 30) -> dist.ProcessGroup:
    """A group of all ranks, beside the default one of gloo."""
    return dist.new_group(backend="cpu:gradsync", timeout=timedelta(seconds=seconds))


def begin_again(folder: Path, backend: str, seconds: float = 30) -> None:
    """End the default group and make another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = FileStore(str(folder / f"store-{backend.translate(str.maketrans(':,', '--'))}"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def outcome(call: Callable[..., Any], group: dist.ProcessGroup) -> Any:
    """What the call returned, or the kind of error that it raised."""
    torch.manual_seed(dist.get_rank())
    try:
        return call(group)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error)


def assert_alike(call: Callable[..., Any], gloo: dist.ProcessGroup, ours: dist.ProcessGroup) -> None:
    """Both do the same to the bit."""
    expected, found = outcome(call, gloo), outcome(call, ours)
    assert flat(found) == flat(expected), f"{call.__name__}: {found} is not {expected}"


def flat(value: Any) -> Any:
    """Tensors as what can be compared."""
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.is_sparse else value
        # Bits, not values: a NaN equals itself, and minus zero is not zero.
        bits = dense.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        return str(dense.dtype), tuple(dense.shape), bits.tolist()
    if isinstance(value, list | tuple):
        return [flat(each) for each in value]
    return value
