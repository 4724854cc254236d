"""One replica of the model, and the three ways to train it that the arms are made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradsync as gs
from gradsync.cli.demo.story.demo_model import loss_of
from slow_link.data import Batch


@dataclass
class Replica:
    """A model that trains.

    Args:
        model: The bare one.
        forward: What is called: the model, or DDP around it.
        optimizer: Of the model.
        claimed_nbytes: What a rank says it sends per synchronization.
        every: DDP synchronizes in every so many micro-batches; gradsync counts them itself.
        close: Ends what the model was attached to; called by all ranks.
    """

    model: nn.Module
    forward: nn.Module
    optimizer: Optimizer
    claimed_nbytes: Callable[[], float]
    every: int = 1
    close: Callable[[], None] = lambda: None
    _taken: int = 0

    def step(self, batch: Batch) -> torch.Tensor:
        """One micro-batch, forward and back; its loss."""
        self._taken += 1
        full = self._taken % self.every == 0
        with nullcontext() if full else self.forward.no_sync():
            loss = loss_of(self.forward, batch)
            (loss / self.every).backward()
        if full:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def plain(model: nn.Module, optimizer: Optimizer) -> Replica:
    """No synchronization: what computation alone costs."""
    return Replica(model, model, optimizer, lambda: 0)


def ddp(model: nn.Module, optimizer: Optimizer, *, view: bool = False, every: int = 1, half: bool = False) -> Replica:
    """DistributedDataParallel; `half`: with torch's own hook that sends fp16."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
    if half:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    numel = sum(parameter.numel() for parameter in model.parameters())
    return Replica(model, wrapped, optimizer, partial(_ring_nbytes, numel, 2 if half else 4), every)


def ddp_powersgd(model: nn.Module, optimizer: Optimizer, *, rank: int) -> Replica:
    """DistributedDataParallel with torch's own PowerSGD, from the second step on: its earliest.

    In one bucket: with two, over gloo, the hook's all-reduces meet in the wrong order and end the process.
    """
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1 << 14)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    numel = sum(parameter.numel() for parameter in model.parameters())

    def claimed() -> float:
        return _ring_nbytes(numel, 4) / (state.compression_stats()[0] or 1)

    return Replica(model, wrapped, optimizer, claimed)


def ours(model: nn.Module, optimizer: Optimizer, *, plan: gs.Plan) -> Replica:
    """gradsync."""
    sync = gs.attach(model, optimizer, plan)

    def claimed() -> Any:
        return sync.stats()["sent_nbytes"]

    return Replica(model, model, optimizer, claimed, close=sync.detach)


def _ring_nbytes(numel: int, itemsize: int) -> float:
    """What each rank sends in gloo's ring all-reduce."""
    size = dist.get_world_size()
    return 2 * (size - 1) / size * numel * itemsize
