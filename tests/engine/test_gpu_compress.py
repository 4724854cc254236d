"""Compression on a GPU: the same bits as on the CPU over gloo, and no waiting of the host on NCCL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.compress.recipe import Compressor
from gradsync.engine.attach import attach_engine
from silent_device import host_never_waits
from yardstick import assert_replicas_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")

TO_THE_BIT = {
    "bf16": gs.bf16(),
    "fp16": gs.fp16(),
    "int8": gs.int8(),
    "int4": gs.int4(),
    "stochastic": gs.int8(rounding="stochastic"),
    "sign": gs.sign(),
    "topk": gs.topk(0.05),
    "randomk": gs.randomk(0.05),
    "by_parameter": gs.by_parameter({"*.bias": None, "0.*": gs.int4(), "*": gs.bf16()}),
}
EVERY = TO_THE_BIT | {"powersgd": gs.powersgd(2), "warmup": gs.warmup(gs.int8(), 2)}


def _averages(compressor: Compressor, device: str, steps: int) -> list[torch.Tensor]:
    """Averaged gradients of a model whose gradients are given numbers, the same on every device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 70), nn.Linear(70, 5)).to(device)
    plan = gs.Plan(compress=compressor, bucket_bytes=100_000)
    sync = attach_engine(model, None, plan, None, "broadcast", (), None, always=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(steps):
        model.zero_grad()
        given = [torch.randn(param.shape, generator=generator).to(device) for param in model.parameters()]
        model(torch.zeros(1, 300, device=device)).sum().mul(0).add(
            sum((param * grad).sum() for param, grad in zip(model.parameters(), given, strict=True))
        ).backward()
        found += [param.grad.detach().cpu().clone() for param in model.parameters()]
    sync.detach()
    return found


def same_on_both(names: list[str]) -> None:
    for name in names:
        ours, reference = (_averages(EVERY[name], device, 4) for device in ("cuda", "cpu"))
        assert_replicas_equal({str(i): tensor for i, tensor in enumerate(ours)})
        for a, b in zip(ours, reference, strict=True):
            if name in TO_THE_BIT:
                assert torch.equal(a, b), name
            else:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_over_gloo_a_gpu_gives_the_bits_of_the_cpu(run: Callable[..., Any], ranks: int) -> None:
    run(same_on_both, list(EVERY), ranks=ranks, timeout=300)


def one_rank_on_nccl(names: list[str]) -> None:
    dist.destroy_process_group()
    gs.init()
    for name in names:
        got = _averages(EVERY[name], "cuda", 3)
        assert all(tensor.isfinite().all() for tensor in got), name


def test_every_compressor_runs_on_nccl_with_one_rank(run: Callable[..., Any]) -> None:
    run(one_rank_on_nccl, list(EVERY), ranks=1, timeout=300)


def no_synchronization_with_the_host(names: list[str]) -> None:
    dist.destroy_process_group()
    gs.init()
    for name in names:
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = gs.Plan(compress=EVERY[name], bucket_bytes=1 << 16)
        sync = attach_engine(model, optimizer, plan, None, "broadcast", (), None, always=True)
        x = torch.randn(16, 128).cuda()
        for step in range(6):
            with host_never_waits() if step >= 4 else nullcontext():  # kernels are compiled, and warm-ups over
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        sync.detach()


def test_on_nccl_the_host_never_waits_for_a_compressor(run: Callable[..., Any]) -> None:
    run(no_synchronization_with_the_host, list(EVERY), ranks=1, timeout=300)
