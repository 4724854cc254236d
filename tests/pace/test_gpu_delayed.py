"""Delayed averages on a GPU: several ranks over gloo on one device, with half types and a GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

import gradsync as gs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(16, 64, generator=generator).cuda()).square().mean()
    return loss


def like_by_hand(k: int, compress: gs.Compressor | None) -> None:
    model, optimizer = _model()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(k), compress=compress))
    for step in range(8):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    by_hand, optimizer = _model()
    means: list[list[torch.Tensor]] = []
    for step in range(8 + k):
        if step < 8:
            _loss(by_hand, step).backward()
            grads = [param.grad.cpu() / dist.get_world_size() for param in by_hand.parameters()]  # type: ignore[union-attr]
            for grad in grads:
                dist.all_reduce(grad)
            means.append(grads)
        optimizer.zero_grad()
        if step >= k:
            for param, mean in zip(by_hand.parameters(), means[step - k], strict=True):
                param.grad = mean.cuda()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        if compress is None:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("k", "compress"), [(1, None), (3, None), (2, gs.int8())])
def test_on_one_gpu_over_gloo_it_equals_the_loop_by_hand(
    k: int, compress: gs.Compressor | None, run: Callable[..., Any]
) -> None:
    run(like_by_hand, k, compress, timeout=120)


def scaled(enabled: bool) -> list[torch.Tensor]:
    model, optimizer = _model()
    scaler = GradScaler("cuda", init_scale=2.0, growth_interval=1, enabled=enabled)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(2)), scaler=scaler)
    for step in range(8):
        scaler.scale(_loss(model, step)).backward()
        if not sync.mid_window:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    sync.detach()
    return [param.detach().cpu() for param in model.parameters()]


def test_on_a_gpu_a_growing_scale_changes_nothing(run: Callable[..., Any]) -> None:
    with_scaler, without = run(scaled, True, timeout=120), run(scaled, False, timeout=120)
    assert all(torch.equal(a, b) for a, b in zip(with_scaler[0], without[0], strict=True))
