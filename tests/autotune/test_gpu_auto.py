"""On a GPU: a profile by events, and `gs.auto()` with two ranks over gloo on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from autos import BUCKETS, Training, choosing, cluster, overhearing
from models import mlp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")


def test_a_profile_stands_in_the_order_of_backward() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4096, 512, device="cuda")

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = gs.profile(model, step, optimizer)
    assert [gradient.name[0] for gradient in profile.gradients][::2] == ["3", "2", "1", "0"]
    assert min(profile.forward_s, profile.backward_s, profile.optimizer_s) > 0
    assert profile.gradients[-1].ready_s <= profile.backward_s
    assert profile.host_s is not None
    assert profile.compute_s >= profile.host_s > 0  # the host issued all that, and was ahead meanwhile


class OnGpu(Training):
    def loss(self, step: int) -> torch.Tensor:
        return self.model(torch.full((6, 8), float(step + dist.get_rank()), device="cuda")).square().mean()

    def digest(self) -> str:
        return str([param.double().sum().item() for param in self.model.parameters()])


def check_auto() -> list[str]:
    theirs = OnGpu(gs.Plan(), lambda: mlp().cuda())
    with choosing(BUCKETS) as profiles, overhearing():
        ours = OnGpu(gs.auto(cluster=cluster(), steps=2), lambda: mlp().cuda())
        digests = ours.train(range(6))
    assert ours.sync.plan == BUCKETS
    assert digests == theirs.train(range(6))
    assert all(profile.backward_s > 0 for profile in profiles)
    for each in (ours, theirs):
        each.sync.detach()
    return digests


def test_two_ranks_switch_together(run: Callable[..., Any]) -> None:
    one, two = run(check_auto, timeout=120)
    assert one == two


def test_two_ranks_switch_together_over_nccl(nccl: Callable[..., Any]) -> None:
    one, two = nccl(check_auto, timeout=120)
    assert one == two
