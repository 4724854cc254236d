"""Gradients that are computed on several streams of a GPU: a bucket leaves only after all that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs

Run = Callable[..., list[Any]]
SIZE = 1 << 16


class Late(torch.autograd.Function):
    """Passes on what it gets; its backward keeps its stream busy first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch.cuda._sleep(200_000_000)
        return grad.clone()


class TwoBranches(nn.Module):
    """Two parameters, each used on a stream of its own; `first` is used before, so its gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(SIZE, device="cuda")) for _ in "ab")
        self.streams = {"a": torch.cuda.Stream(), "b": torch.cuda.Stream()}

    def forward(self, x: torch.Tensor, first: str) -> torch.Tensor:
        here, total = torch.cuda.current_stream(), []
        for name in (first, "b" if first == "a" else "a"):
            stream = self.streams[name]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                total.append((Late.apply(getattr(self, name) + 0) * x).sum())
            here.wait_stream(stream)
        return total[0] + total[1]


def train() -> None:
    """In the first step a's gradient comes first, then b's: so the buckets are ordered. Later b's comes first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = TwoBranches()
    sync = gs.attach(model, plan=gs.Plan(bucket_bytes=4 * SIZE))
    for step in range(6):
        model.zero_grad()
        model(torch.full((SIZE,), float(step + 1) * (rank + 1), device="cuda"), "b" if step == 0 else "a").backward()
        mean = (step + 1) * (size + 1) / 2
        for name in "ab":
            grad = getattr(model, name).grad
            assert grad is not None
            assert torch.equal(grad, torch.full_like(grad, mean)), f"step {step}, {name}: {grad[:3]}, not {mean}"
    sync.detach()


def test_a_bucket_launched_from_another_stream_waits_for_the_one_that_filled_it(nccl: Run) -> None:
    nccl(train, timeout=120)


def deliver_after_an_abort() -> list[bool]:
    """The communicator is aborted, and a step is delivered after that."""
    model = nn.Linear(64, 64).cuda()
    sync = gs.attach(model, plan=gs.Plan(bucket_bytes=1024))
    for _ in range(2):
        model(torch.ones(4, 64, device="cuda")).sum().backward()
    lane = sync._steps.lane
    before = bool(model.weight.grad.isfinite().all())  # type: ignore[union-attr]
    lane.groups.abort()
    [channel] = lane.groups.on_streams
    channel.aborted(10.0)
    for bucket in sync._synchronization.bucket_order.buckets:
        bucket.hand_out(None, 1.0, lane.groups.alive())
    after = [bool(param.grad.isfinite().all()) for param in model.parameters()]  # type: ignore[union-attr]
    return [before, *after]


def test_nothing_of_an_aborted_communicator_looks_like_a_good_gradient(nccl_alone: Run) -> None:
    for outcome in nccl_alone(deliver_after_an_abort, timeout=120):
        before, *after = outcome.value
        assert before, outcome.text
        assert not all(after)  # the first element of each bucket is enough
