"""On a GPU: several ranks over gloo on one device, one rank over NCCL with the hooks forced on.

Several ranks over NCCL are in `test_gpu_streams.py` and in tests/faults; the script `tests/gpu` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.engine.attach import attach_engine
from models import mlp
from silent_device import host_never_waits
from yardstick import assert_replicas_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")


def _train(kind: str, model: nn.Module, plan: gs.Plan | None = None, steps: int = 10) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = attach_engine(model, optimizer, plan, None, "broadcast", (), None, always=True) if kind == "gs" else None
    forward = DistributedDataParallel(model) if kind == "ddp" else model
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        forward(torch.randn(16, 8, generator=generator).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sync is not None:
        stats = sync.stats()
        assert stats["steps"] == steps
        sync.detach()
    return [p.detach().clone() for p in model.parameters()]


def _same_model() -> nn.Module:
    torch.manual_seed(1)
    return mlp()


def equal_to_ddp_on_gloo() -> None:
    plan = gs.Plan(bucket_bytes=2048)
    ours, theirs = _train("gs", _same_model(), plan), _train("ddp", _same_model())
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    assert_replicas_equal({str(i): p for i, p in enumerate(ours)})


def test_two_ranks_on_one_gpu_over_gloo_equal_ddp_to_the_bit(run: Callable[..., Any]) -> None:
    run(equal_to_ddp_on_gloo, ranks=2, timeout=120)


def mixed_devices() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = nn.Linear(8, 8), nn.Linear(8, 4).cuda()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.there(torch.tanh(self.here(x)).cuda())

    model = Mixed()
    sync = gs.attach(model)
    for _ in range(3):
        model(torch.randn(4, 8) + dist.get_rank()).sum().backward()
    assert_replicas_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    sync.detach()


def test_parameters_may_live_on_host_and_device(run: Callable[..., Any]) -> None:
    run(mixed_devices, ranks=2, timeout=120)


def one_rank_on_nccl() -> None:
    dist.destroy_process_group()
    gs.init()
    assert dist.get_backend_config() if hasattr(dist, "get_backend_config") else True
    plain, ours = _train("plain", _same_model()), _train("gs", _same_model(), gs.Plan(bucket_bytes=2048))
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b)


def test_one_rank_on_nccl_changes_nothing(run: Callable[..., Any]) -> None:
    run(one_rank_on_nccl, ranks=1, timeout=120)


def no_synchronization_with_the_host() -> None:
    dist.destroy_process_group()
    gs.init()
    model = _same_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach_engine(model, optimizer, gs.Plan(bucket_bytes=2048), None, "broadcast", (), None, always=True)
    x = torch.randn(16, 8).cuda()
    for step in range(5):
        with host_never_waits() if step >= 2 else nullcontext():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    sync.detach()


def test_on_nccl_the_host_never_waits_for_the_device(run: Callable[..., Any]) -> None:
    run(no_synchronization_with_the_host, ranks=1, timeout=120)


def several_streams() -> None:
    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 64), nn.Linear(8, 64)
            self.stream = torch.cuda.Stream()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                right = self.right(x)
            left = self.left(x)
            torch.cuda.current_stream().wait_stream(self.stream)
            return left * right

    torch.manual_seed(0)
    model = Streams().cuda()
    sync = gs.attach(model)
    for step in range(20):
        x = torch.full((256, 8), float(dist.get_rank() + step), device="cuda")
        model(x).mean().backward()
        # Every row is equal, so the gradient is known from one row
        expected = torch.stack([_row_gradient(model, r + step) for r in range(dist.get_world_size())]).mean(0)
        assert model.left.bias.grad is not None
        torch.testing.assert_close(model.left.bias.grad, expected, rtol=1e-3, atol=1e-6)
        model.zero_grad()
    sync.detach()


def _row_gradient(model: Any, value: float) -> torch.Tensor:
    x = torch.full((1, 8), float(value), device="cuda")
    with torch.no_grad():
        return (model.right(x) / 64).flatten()


def test_gradients_from_several_streams_are_waited_for(run: Callable[..., Any]) -> None:
    run(several_streams, ranks=2, timeout=120)
