"""Where each rank of a run is, and what torchrun would tell it there. Pure, but for the environment that it adds to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from netlab.wiring import INTERFACE, address

_FIRST_PORT = 29500  # in a network where nobody else listens


class RankPlace(NamedTuple):
    """One rank's; `host` is the index of its host."""

    rank: int
    host: int
    local_rank: int
    local_size: int


def rank_places(hosts: int, ranks_per_host: int | Sequence[int]) -> list[RankPlace]:
    """Ranks are numbered host by host.

    >>> rank_places(2, [2, 1])[2]
    Place(rank=2, host=1, local_rank=0, local_size=1)
    """
    counts = [ranks_per_host] * hosts if isinstance(ranks_per_host, int) else list(ranks_per_host)
    if len(counts) != hosts or min(counts) < 0 or counts[0] < 1:
        raise ValueError(
            f"ranks_per_host must be a number for each of {hosts} hosts, the first at least 1 since rank 0 is there, "
            f"got {ranks_per_host!r}"
        )
    places = [(host, local, count) for host, count in enumerate(counts) for local in range(count)]
    return [RankPlace(rank, *seat) for rank, seat in enumerate(places)]


def environment(
    place: RankPlace, size: int, hosts: int, run: int, extra: dict[str, str], share_gpus: bool = False
) -> dict[str, str]:
    """This process's environment and `extra`, with one thread per rank, less what a torchrun around us said.

    Nor with MPS, which serves no client in another process namespace, unless `extra` says so. With `share_gpus` NCCL
    takes each rank for a host, so that several may be on one GPU, and sends through the host's link, whoever makes the
    group.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "CUDA_MPS_"))}
    habits = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    told = {
        "RANK": place.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.host,
        "GROUP_WORLD_SIZE": hosts,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": _FIRST_PORT + run,
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    if share_gpus:
        told |= {
            "GRADSYNC_SHARE_GPUS": 1,
            "NCCL_HOSTID": f"gradsync-rank-{place.rank}",
            "NCCL_IB_DISABLE": 1,
            "NCCL_SOCKET_IFNAME": f"={INTERFACE}",
        }
    return kept | habits | extra | {name: str(value) for name, value in told.items()}
