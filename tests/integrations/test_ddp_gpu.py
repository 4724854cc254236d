"""A DDP hook on a GPU: several ranks over gloo on one device, one rank over NCCL with compression forced on.

Several GPUs on NCCL could not be tested where this was written; see docs/limits.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import COMPRESSORS, assert_close, assert_equal, assert_replicas_equal, batches, fit, loss_of, mlp
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.integrations.ddp_hook import open_hook
from silent_device import host_never_waits

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")


def _train(plan: gs.Plan | None, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(7)
    model = mlp().cuda()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008, **options)
    state = None
    if plan is not None:
        state, hook = open_hook(plan, ddp, None, always=True)
        ddp.register_comm_hook(state, hook)
    found = fit(model, lambda x: ddp(x.cuda()).cpu(), (16, 9))
    if state is not None:
        state.close()
    return found


def exact_on_gloo() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        assert_equal(_train(gs.Plan(), **options)[0], _train(None, **options)[0])


def test_exact_averages_over_gloo_are_ddps_own_to_the_bit(run: Run) -> None:
    run(exact_on_gloo, timeout=120)


def compressed_on_gloo(name: str) -> None:
    weights, losses = _train(gs.Plan(compress=COMPRESSORS[name]))
    assert_replicas_equal(weights)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_over_gloo_keeps_replicas_equal(name: str, run: Run) -> None:
    run(compressed_on_gloo, name, timeout=120)


def alone_on_nccl() -> None:
    dist.destroy_process_group()
    gs.init()
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        exact = _train(None, **options)[0]
        assert_equal(_train(gs.Plan(), **options)[0], exact)
        assert_equal(_train(gs.Plan(algorithm=gs.native()), **options)[0], exact)
    for name, compressor in COMPRESSORS.items():
        _, losses = _train(gs.Plan(compress=compressor))
        assert losses[-1] < losses[0], name
    assert_close(_train(gs.Plan(compress=gs.error_feedback(gs.fp16())))[0], exact)


def test_one_rank_on_nccl_trains_with_everything(run: Run) -> None:
    run(alone_on_nccl, ranks=1, timeout=120)


def no_waiting(compress: Any) -> None:
    dist.destroy_process_group()
    gs.init()
    ddp = DistributedDataParallel(mlp().cuda(), bucket_cap_mb=0.008)
    state, hook = open_hook(gs.Plan(compress=compress), ddp, None, always=True)
    ddp.register_comm_hook(state, hook)
    x = batches(16, 9)().cuda()
    for step in range(6):
        with host_never_waits() if step >= 3 else nullcontext():
            loss_of(ddp, x).backward()
    state.close()


@pytest.mark.parametrize("compress", [None, gs.int8(), gs.powersgd(2)], ids=repr)
def test_on_nccl_the_host_never_waits_for_the_device(compress: Any, run: Run) -> None:
    run(no_waiting, compress, ranks=1, timeout=120)
