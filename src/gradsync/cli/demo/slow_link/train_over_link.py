"""The program of each rank: it moves to a network of its own, is joined to the other by a slow link, trains over it.

    rank 0 ─ unshare ─┬─ barrier ─ connects both ─┬─ barrier ─ new group, over eth0 ─ a step of each arm in turn ─ ...
    rank 1 ─ unshare ─┘            waits          ┘
                      └─ over the pool's group: ──┘
                         its sockets stay in the old network

Every arm starts from the same weights and sees the same batches. They take turns, there and back again, so that
whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.optim import AdamW

from gradsync.cli.bench.other_processes import OtherProcesses
from gradsync.cli.demo.slow_link import namespaces
from gradsync.cli.demo.slow_link.link_variants import VARIANTS, Wrap
from gradsync.cli.demo.slow_link.shaped_link import INTERFACE, Shaper, connect
from gradsync.cli.demo.slow_link.traffic import payload, sent
from gradsync.cli.demo.story.corpus import Text, read_library
from gradsync.cli.demo.story.demo_model import DemoShape, build, loss_of
from gradsync.cli.demo.story.train_variants import LEARNING_RATE, rank_batch, validate
from gradsync.cli.local_ranks import advance

UNTIMED = 3  # first steps of an arm: DDP and gradsync learn in which order gradients come
_VALIDATION_WINDOWS = 64
_TIMEOUT = timedelta(minutes=2)  # of the group; the slowest link takes 10 s for all gradients


class LinkRecord(NamedTuple):
    """The record of one rank on one arm."""

    steps_s: list[float]  # of each timed step
    sent_nbytes: list[int]  # in each of them, without headers
    validation_loss: float | None  # rank 0's


class Replica:
    """One arm's model, on this rank."""

    def __init__(self, wrap: Wrap, shape: DemoShape) -> None:
        self._plain = build(shape)
        self._optimizer = AdamW(self._plain.parameters(), lr=LEARNING_RATE)
        self._model, self.end = wrap(self._plain, self._optimizer)
        self._steps_s: list[float] = []
        self._sent_nbytes: list[int] = []

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Train on a batch, and write down what that took."""
        dist.barrier()
        before, start = _sent(), time.perf_counter()
        loss_of(self._model, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps_s.append(time.perf_counter() - start)
        dist.barrier()  # what this rank sent has left the shaper's queue: the other has it
        self._sent_nbytes.append(_sent() - before)

    def record(self, text: Text, shape: DemoShape) -> LinkRecord:
        """Return this rank's record of the arm."""
        loss = validate(self._plain, text, shape, _VALIDATION_WINDOWS) if dist.get_rank() == 0 else None
        return LinkRecord(self._steps_s[UNTIMED:], self._sent_nbytes[UNTIMED:], loss)


def train(shape: DemoShape, steps: int, shaper: Shaper, folder: str) -> tuple[dict[str, LinkRecord], float]:
    """The record of each arm, and on rank 0 how many cores other processes kept busy meanwhile.

    Every arm trains for `steps` steps over one link; both ranks of a group call it, and leave that group.
    """
    _move(shaper, folder)
    text, rank = read_library(), dist.get_rank()
    replicas = {name: Replica(wrap, shape) for name, wrap in VARIANTS.items()}
    others = OtherProcesses()
    for step in range(steps):
        turn = list(replicas.values())
        for replica in reversed(turn) if step % 2 else turn:
            replica.step(rank_batch(text, shape, step, rank))
            if rank == 0:
                advance(folder)
    busy_cores = others.cores()
    for replica in replicas.values():
        replica.end()
    records = {name: replica.record(text, shape) for name, replica in replicas.items()}
    dist.barrier()  # nobody ends while the other still computes
    return records, busy_cores


def _move(shaper: Shaper, folder: str) -> None:
    """Leave the group on loopback for one over the link."""
    rank, pids = dist.get_rank(), torch.zeros(dist.get_world_size(), dtype=torch.int64, device="cpu")
    namespaces.unshare(namespaces.NEWNET)  # for this thread, and for those that it starts from now on
    pids[rank] = os.getpid()
    dist.all_reduce(pids)  # numbers, not objects: nothing is ever unpickled from the network
    if rank == 0:
        first, second = pids.tolist()
        connect(first, second, shaper)
    dist.barrier()
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    store = FileStore(os.path.join(folder, "store"), len(pids))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(pids), timeout=_TIMEOUT)


def _sent() -> int:
    return payload(*sent(Path("/proc/thread-self/net/dev").read_text()))
