"""What ranks of a lab reduce by an algorithm of their choice, and what their host sends meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.exchange.group_cache import group_cache
from netlab.lab_plays import ALGORITHMS
from netlab.traffic import payload, sent

_CALLS = 3


def reduce_and_count(names: list[str], numels: list[int]) -> dict[str, Any]:
    """The hosts as gradsync sees them; by algorithm: whether all was exact, and what this host sent for each size."""
    gs.init(timeout=30)
    reduced = {name: [_reduce(name, numel) for numel in numels] for name in names}
    hosts = group_cache(dist.group.WORLD).lane.hosts
    dist.destroy_process_group()
    return {
        "hosts": hosts,
        "exact": {name: all(exact for exact, _ in pairs) for name, pairs in reduced.items()},
        "sent": {name: [nbytes for _, nbytes in pairs] for name, pairs in reduced.items()},
    }


def _reduce(name: str, numel: int) -> tuple[bool, int]:
    """Whether all calls were exact, and the least that one sent: TCP may send twice, an algorithm would always."""
    gs.all_reduce(torch.ones(1), algorithm=ALGORITHMS[name])  # makes the connections
    calls = [_reduce_once(name, numel) for _ in range(_CALLS)]
    return all(exact for exact, _ in calls), min(nbytes for _, nbytes in calls)


def _reduce_once(name: str, numel: int) -> tuple[bool, int]:
    """Whole numbers, so that every order of additions gives the same bits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counting = torch.arange(numel, dtype=torch.float32) % 1000
    tensor = counting * (rank + 1)
    dist.barrier()
    before = sent(Path("/proc/net/dev").read_text())
    gs.all_reduce(tensor, algorithm=ALGORITHMS[name], op="sum")
    dist.barrier()  # the other ranks of this host have sent theirs too
    after = sent(Path("/proc/net/dev").read_text())
    exact = torch.equal(tensor, counting * (size * (size + 1) // 2))
    return exact, payload(after.nbytes - before.nbytes, after.packets - before.packets)


def ask_for_shared_memory() -> str:
    """What is said to who wants shared memory between hosts."""
    gs.init(timeout=30)
    try:
        gs.all_reduce(torch.ones(8), algorithm=gs.shared_memory())
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "nothing"
