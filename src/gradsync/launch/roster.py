"""The record that each rank tells the others before the group is made, and what follows from it. Pure.

Every rank holds the same lists, so every rank comes to the same sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsync.launch.choose_backend import backends_by_device, default_backend, shared_gpu
from gradsync.launch.interface import Endpoint
from gradsync.launch.shared_gpus import ranks_that_share, sharing_refusal


@dataclass(frozen=True)
class RankRecord:
    """The identity of a rank: what it knows before it knows the others."""

    hostname: str
    host: str
    """The host as our topology sees it, maybe declared by the user."""
    network: str
    """The host as packets see it: equal iff loopback connects."""
    towards_master: str | None
    backend: str | None
    """The backend that the user asked for."""
    share_gpus: bool = False
    """True if ranks may share a GPU over NCCL."""
    host_id: str | None = None
    """The one by which the user wants NCCL to know it."""

    @property
    def name(self) -> str:
        return self.host.removeprefix("declared:") if self.host.startswith("declared:") else self.hostname

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankPlacement:
    """A rank's interface and GPU, or why it has none."""

    interface: str | None
    address: str
    gpu: str | None
    problem: str | None
    nccl: Sequence[int] | None = None
    """The version of NCCL."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.interface, self.address)

    def record(self) -> dict[str, Any]:
        return asdict(self)


def refusal(peers: Sequence[RankRecord], placements: Sequence[RankPlacement]) -> str | None:
    """The sentence for which no group is made, or None."""
    for rank, placement in enumerate(placements):
        if placement.problem is not None:
            return f"rank {rank} on host {peers[rank].name} cannot take part: {placement.problem}"
    return (
        _refuse_backends(peers, placements) or _refuse_sharing(peers, placements) or _refuse_loopback(peers, placements)
    )


def shares_over_nccl(peers: Sequence[RankRecord], placements: Sequence[RankPlacement]) -> bool:
    """Return whether there are ranks on one GPU that NCCL is to serve."""
    gpus, allowed = [placement.gpu for placement in placements], peers[0].share_gpus
    backend = peers[0].backend or default_backend(gpus, allowed)[0]
    return allowed and bool(ranks_that_share(gpus)) and backends_by_device(backend).get("cuda") == "nccl"


def _refuse_backends(peers: Sequence[RankRecord], placements: Sequence[RankPlacement]) -> str | None:
    asked = peers[0].backend
    for rank, peer in enumerate(peers):
        if peer.backend != asked:
            return (
                f"the ranks call init with different backends: rank 0 with {asked!r}, rank {rank} with {peer.backend!r}"
            )
    if asked is None or backends_by_device(asked).get("cuda") != "nccl":
        return None
    for rank, placement in enumerate(placements):
        if placement.gpu is None:
            name = peers[rank].name
            return f"backend {asked!r} needs a GPU on every rank, and rank {rank} on host {name} has none"
    sharing = shared_gpu([placement.gpu for placement in placements])
    if sharing is not None and not peers[0].share_gpus:
        return (
            f"backend {asked!r} needs a GPU for every rank, and ranks {sharing[0]} and {sharing[1]} share "
            f"{placements[sharing[0]].gpu}: start fewer ranks, use backend='cpu:gloo,cuda:gloo', or, for tests, "
            "gs.init(share_gpus=True)"
        )
    return None


def _refuse_sharing(peers: Sequence[RankRecord], placements: Sequence[RankPlacement]) -> str | None:
    allowed = peers[0].share_gpus
    for rank, peer in enumerate(peers):
        if peer.share_gpus != allowed:
            return (
                f"rank {0 if allowed else rank} lets ranks share a GPU over NCCL, rank {rank if allowed else 0} does "
                "not: give all the same share_gpus, or set GRADSYNC_SHARE_GPUS on every host"
            )
    if not shares_over_nccl(peers, placements):
        return None
    gpus, versions = ([placement.gpu for placement in placements], [placement.nccl for placement in placements])
    return sharing_refusal(gpus, [peer.host_id for peer in peers], versions)


def _refuse_loopback(peers: Sequence[RankRecord], placements: Sequence[RankPlacement]) -> str | None:
    if len({peer.network for peer in peers}) == 1:
        return None
    for rank, placement in enumerate(placements):
        if placement.endpoint.loopback:
            here = peers[rank]
            far, other = next((r, peer) for r, peer in enumerate(peers) if peer.network != here.network)
            return (
                f"rank {rank} on host {here.name} would use gloo on {placement.endpoint}, which is loopback and "
                f"out of reach for rank {far} on host {other.name}: set GLOO_SOCKET_IFNAME there to the "
                "interface between the hosts, or let /etc/hosts give the host's name its real address"
            )
    return None


def announcement(
    rank: int, peers: Sequence[RankRecord], placements: Sequence[RankPlacement], backend: str
) -> str | None:
    """The line that the first rank of each host prints; None on the others."""
    here = (peers[rank].network, peers[rank].host)
    ranks = [r for r, peer in enumerate(peers) if (peer.network, peer.host) == here]
    if rank != ranks[0]:
        return None
    noun = "rank" if len(ranks) == 1 else "ranks"
    return (
        f"gradsync: host {peers[rank].name}: {noun} {spans(ranks)} of {len(peers)}, "
        f"gloo on {placements[rank].endpoint}, backend {backend}"
    )


def spans(ranks: Sequence[int]) -> str:
    """The text for rising ranks, kept short.

    >>> spans([0, 1, 2, 3, 8]), spans([5])
    ('0-3,8', '5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
