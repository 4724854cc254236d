"""What each rank of the slow-link demo runs: it moves to a network of its own, is joined to the other, and trains.

    rank 0 ─ unshare ─┬─ barrier ─ connects both ─┬─ barrier ─ new group, over eth0 ─ arm ─ arm ─ ... ─ arm
    rank 1 ─ unshare ─┘            waits          ┘
                      └─ over the pool's group: ──┘
                         its sockets stay in the old network

The arms run one after the other, each from the same weights and on the same batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from gradsync.cli.progress import advance
from gradsync.cli.slow_link import namespaces
from gradsync.cli.slow_link.traffic import Traffic, payload, sent
from gradsync.cli.slow_link.wiring import INTERFACE, Shaper, connect
from gradsync.cli.story.arms import ALONE, DDP, LEARNING_RATE, share, validate
from gradsync.cli.story.model import Shape, build, loss_of
from gradsync.cli.story.text import Text, read_library
from gradsync.compress.choice import Compressor
from gradsync.compress.integers import int4, int8
from gradsync.compress.powersgd import powersgd
from gradsync.compress.topk import topk
from gradsync.engine.attachment import attach
from gradsync.plan import Plan

UNTIMED = 3  # first steps of an arm: DDP and gradsync learn in which order gradients come
_VALIDATION_WINDOWS = 64
_TIMEOUT = timedelta(minutes=2)  # of the group; the slowest link takes 10 s for all gradients

Way = Callable[[nn.Module, Optimizer], tuple[nn.Module, Callable[[], None]]]
"""From a model and its optimizer to what is called in its place, and what ends it."""


class Ledger(NamedTuple):
    """What one rank has to tell of one arm."""

    steps_s: list[float]  # of each timed step
    sent_nbytes: float  # in a step, without headers
    validation_loss: float | None  # rank 0's


def _alone(plain: nn.Module, _: Optimizer) -> tuple[nn.Module, Callable[[], None]]:
    return plain, lambda: None


def _ddp(plain: nn.Module, _: Optimizer, half: bool = False) -> tuple[nn.Module, Callable[[], None]]:
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    if half:
        model.register_comm_hook(None, fp16_compress_hook)
    return model, lambda: None


def _ours(
    plain: nn.Module, optimizer: Optimizer, compress: Compressor | None = None
) -> tuple[nn.Module, Callable[[], None]]:
    return plain, attach(plain, optimizer, Plan(compress=compress)).detach


EXACT = "gradsync"
COMPRESSED: dict[str, Way] = {
    "gradsync int8()": partial(_ours, compress=int8()),
    "gradsync int4()": partial(_ours, compress=int4()),
    "gradsync topk(0.01)": partial(_ours, compress=topk(0.01)),
    "gradsync powersgd(4)": partial(_ours, compress=powersgd(4)),
}
ARMS: dict[str, Way] = {
    ALONE: _alone,
    DDP: _ddp,
    "DDP, fp16 hook": partial(_ddp, half=True),
    EXACT: _ours,
    **COMPRESSED,
}


def train(shape: Shape, steps: int, shaper: Shaper, folder: str) -> dict[str, Ledger]:
    """Every arm for `steps` steps over a link of its own; both ranks of a group call it, and leave that group."""
    _move(shaper, folder)
    text = read_library()
    return {name: _run(way, text, shape, steps, os.path.join(folder, "progress")) for name, way in ARMS.items()}


def _move(shaper: Shaper, folder: str) -> None:
    """From the group on loopback to one over the link."""
    rank, pids = dist.get_rank(), [0, 0]
    namespaces.unshare(namespaces.NEWNET)  # for this thread, and for those that it starts from now on
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        connect(*pids, shaper)
    dist.barrier()
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    store = FileStore(os.path.join(folder, "store"), len(pids))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(pids), timeout=_TIMEOUT)


def _run(way: Way, text: Text, shape: Shape, steps: int, progress: str) -> Ledger:
    plain = build(shape)
    optimizer = AdamW(plain.parameters(), lr=LEARNING_RATE)
    model, end = way(plain, optimizer)
    rank, steps_s = dist.get_rank(), []
    for step in range(steps):
        if step == UNTIMED:
            dist.barrier()
            before = _sent()
        batch = share(text, shape, step, rank)
        start = time.perf_counter()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps_s.append(time.perf_counter() - start)
        if rank == 0:
            advance(progress)
    dist.barrier()  # what this rank sent has left the shaper's queue: the other has it
    after = _sent()
    end()
    sent_nbytes = payload(after.nbytes - before.nbytes, after.packets - before.packets) / (steps - UNTIMED)
    loss = validate(plain, text, shape, _VALIDATION_WINDOWS) if rank == 0 else None
    return Ledger(steps_s[UNTIMED:], sent_nbytes, loss)


def _sent() -> Traffic:
    return sent(Path("/proc/thread-self/net/dev").read_text())
