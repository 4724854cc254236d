"""`gs.init()`: the process group that the launcher meant, or one rank, or a sentence.

In phases: adopt a group that exists; read what the launcher said (`environment`); with one rank, make a
group without any port; else meet in a store (`rendezvous`), exchange who is where, agree on interface
(`interface`) and backend (`backend`), and only then connect.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

# torch.distributed has this name too, but only this module declares it to type checkers.
from torch._C._distributed_c10d import HashStore

from gradsync.errors import LaunchError, place
from gradsync.launch.choose_backend import backends_by_device, check_backend, default_backend, use_device
from gradsync.launch.environment import Task, read_task
from gradsync.launch.forming import form_group
from gradsync.launch.interface import (
    Endpoint,
    endpoint_towards,
    local_address,
    loopback_endpoint,
    named_endpoint,
    network_identity,
)
from gradsync.launch.rendezvous import Rendezvous
from gradsync.launch.roster import RankPlacement, RankRecord, announcement, refusal, shares_over_nccl
from gradsync.launch.shared_gpus import NOTE, nccl_variables, nccl_version, own_host_id, sharing_allowed
from gradsync.transport.host_meeting import declare_host, host_identity

_TIMEOUT = timedelta(minutes=10)
_IFNAME = "GLOO_SOCKET_IFNAME"


def init(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    host: str | None = None,
    share_gpus: bool | None = None,
) -> None:
    """Make the default process group from torchrun's, SLURM's or MPI's environment, or adopt it.

    Without a launcher this is one rank: a group without any port, silent. With one, either all ranks
    that it announced are in the group when `init` returns, or every rank raises `LaunchError`.

    `backend` is `cpu:gloo,cuda:nccl` where every rank has a GPU of its own, else gloo. `timeout`
    (seconds, 10 minutes by default) bounds both the launch and the group's operations. `host` makes
    this process count as being on a host of that name, for the choice of algorithms and transports.
    `share_gpus=True` (or GRADSYNC_SHARE_GPUS=1) lets NCCL serve several ranks on one GPU, for tests: through sockets,
    since each counts as a host for NCCL.

    >>> init()
    >>> torch.distributed.get_world_size()
    1
    >>> init()  # again: adopts the group
    >>> torch.distributed.destroy_process_group()
    """
    limit, share = _limit(timeout), sharing_allowed(share_gpus, os.environ)
    if backend is not None:
        check_backend(backend)
    if host is not None:
        if not isinstance(host, str) or not host:
            raise ValueError(f"host must be a name such as 'a', got {host!r}")
        declare_host(host)
    if dist.is_initialized():
        _adopt(backend)
    elif (task := read_task(os.environ, os.getppid())) is None:
        _start_alone(backend, limit)
    else:
        _start_together(task, backend, limit, share)


def _limit(timeout: float | timedelta | None) -> timedelta:
    if timeout is None:
        return _TIMEOUT
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout must be seconds or a timedelta, got {timeout!r}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return timedelta(seconds=seconds)


def _adopt(backend: str | None) -> None:
    """Leave the group as it is, unless it is smaller than what the launcher announced.

    A larger one is fine: a task may have started ranks of its own.
    """
    world_size = dist.get_world_size()
    try:
        task = read_task(os.environ, os.getppid())
    except LaunchError:
        if world_size == 1:
            raise
        return  # the group formed in spite of an environment that we cannot read
    if task is not None and world_size < task.world_size:
        raise LaunchError(
            f"{place(task.rank, task.world_size)} {task.launcher} announced {task.world_size} tasks, but the "
            f"process group that exists has {world_size}, so models would train apart: make the group from "
            "the launcher's environment, or leave that to gradsync.init()"
        )
    have = dist.get_backend_config()
    if backend is not None and not backends_by_device(backend).items() <= backends_by_device(have).items():
        raise ValueError(
            f"backend {backend!r} was asked for, but the process group that exists has {have!r}: "
            "leave backend out to adopt it"
        )


def _start_alone(backend: str | None, limit: timedelta) -> None:
    if _IFNAME not in os.environ and (here := loopback_endpoint()) is not None:
        _use(here)
    gpu = "alone" if torch.cuda.is_available() else None
    backend = backend or default_backend([gpu])[0]
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)


def _start_together(task: Task, backend: str | None, limit: timedelta, share_gpus: bool) -> None:
    rendezvous = Rendezvous(task, limit)
    me = RankRecord(
        hostname=socket.gethostname(),
        host=host_identity(),
        network=network_identity(),
        towards_master=local_address(task.address),
        backend=backend,
        share_gpus=share_gpus,
        host_id=own_host_id(),
    )
    peers = [RankRecord(**record) for record in rendezvous.exchange("peer", me.record())]
    placement = _choose_placement(task, peers)
    placements = [RankPlacement(**record) for record in rendezvous.exchange("placement", placement.record())]
    if (sentence := refusal(peers, placements)) is not None:
        rendezvous.finish("placement")
        raise LaunchError(f"{place(task.rank, task.world_size)} {sentence}")
    _use(placement.endpoint)
    gpus = [placement.gpu for placement in placements]
    fallback, note = default_backend(gpus, share_gpus)
    if shares_over_nccl(peers, placements):
        os.environ.update(nccl_variables(task.rank, gpus, placement.interface, os.environ))
        note = NOTE
    elif backend is not None:
        note = None
    if note is not None and task.rank == 0:
        _say(f"gradsync: {note}")
    line = announcement(task.rank, peers, placements, backend or fallback)
    if line is not None:
        _say(line)
    form_group(backend or fallback, rendezvous, task, limit)


def _choose_placement(task: Task, peers: list[RankRecord]) -> RankPlacement:
    """This rank's interface and GPU, now that it is known who else is on this host."""
    network = peers[task.rank].network
    neighbours = [rank for rank, peer in enumerate(peers) if peer.network == network]
    local_rank = neighbours.index(task.rank) if task.local_rank is None else task.local_rank
    gpu = use_device(local_rank)
    try:
        endpoint = _endpoint(task, peers)
    except ValueError as error:
        return RankPlacement(None, "127.0.0.1", gpu, problem=str(error))
    return RankPlacement(endpoint.interface, endpoint.address, gpu, None, nccl_version())


def _endpoint(task: Task, peers: list[RankRecord]) -> Endpoint:
    if names := os.environ.get(_IFNAME):
        return named_endpoint(names)
    me = peers[task.rank]
    elsewhere = [peer for peer in peers if peer.network != me.network]
    if not elsewhere:
        return loopback_endpoint() or endpoint_towards(task.address)
    # On the master's own host its name often resolves to 127.0.1.1; the way to a peer is then the way out.
    for remote in dict.fromkeys([task.address, *(peer.towards_master for peer in elsewhere)]):
        if remote is not None and not (endpoint := endpoint_towards(remote)).loopback:
            return endpoint
    return endpoint_towards(task.address)


def _say(line: str) -> None:
    """Print the line in one write: the ranks of all hosts often share one terminal."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _use(endpoint: Endpoint) -> None:
    """Set the interface by the environment, which is gloo's only switch; groups made later follow it too."""
    if endpoint.interface is not None:
        os.environ[_IFNAME] = endpoint.interface
