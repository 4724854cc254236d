"""The numbers, never objects, that the ranks of a bench tell each other between measurements."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync.transport.host_meeting import host_identity


class RankSpread(NamedTuple):
    """The spread of the ranks over hosts."""

    num_hosts: int
    ranks_here: int  # on this rank's host


def collect(numbers: list[float]) -> list[list[float]]:
    """Every rank's numbers on rank 0, equally many from each; nothing elsewhere."""
    row = torch.tensor(numbers, dtype=torch.float64)
    if dist.get_rank() != 0:
        dist.gather(row)
        return []
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.gather(row, rows)
    return [each.tolist() for each in rows]


def decide(*numbers: int) -> list[int]:
    """Rank 0's numbers, on every rank."""
    row = torch.tensor(numbers, dtype=torch.int64)
    dist.broadcast(row, 0)
    return row.tolist()


def spread_over_hosts() -> RankSpread:
    """Return how many hosts the group spans, and how many ranks are on this one; all ranks call it."""
    mine = torch.tensor(int.from_bytes(sha256(host_identity().encode()).digest()[:7]))
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(each, mine)
    hosts = [int(host) for host in each]
    return RankSpread(len(set(hosts)), hosts.count(int(mine)))
