"""What is attached is not wrapped by DDP too, in whichever order: gradients would be averaged twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs

Run = Callable[..., list[Any]]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def step(called: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    called(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrap_attached() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sync = gs.attach(net, optimizer)
    for wrapped in (net, net[0], nn.Sequential(net, nn.Linear(2, 2))):
        with pytest.raises(ValueError, match=r"parameter .*weight is attached to gradsync, .* leave the wrapper out"):
            DistributedDataParallel(wrapped)
    step(net, optimizer)
    sync.detach()
    step(DistributedDataParallel(net), optimizer)


def test_an_attached_model_is_not_wrapped(run: Run) -> None:
    run(wrap_attached)


def wrap_the_rest() -> None:
    """DDP leaves alone what it was told to: then each averages its own part."""
    net = model()
    sync = gs.attach(net[0])
    net._ddp_params_and_buffers_to_ignore = ["0.weight", "0.bias"]  # type: ignore[assignment]
    ddp = DistributedDataParallel(net)
    ddp(torch.full((2, 8), float(dist.get_rank()))).sum().backward()
    grads = [param.grad.clone() for param in net.parameters()]  # type: ignore[union-attr]
    for grad in grads:
        total = grad.clone()
        dist.all_reduce(total)
        assert torch.equal(total, dist.get_world_size() * grad), "the same on all ranks"
    sync.detach()


def test_a_part_that_ddp_leaves_alone_may_be_attached(run: Run) -> None:
    """Called through a wrapper that averages none of what is attached."""
    run(wrap_the_rest)


def attach_wrapped() -> None:
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="is under DistributedDataParallel"):
        gs.attach(ddp, optimizer)
    sync = gs.attach(net, optimizer)
    with pytest.raises(ValueError, match=r"called through its wrapper, .* call the model itself \(ddp.module\)"):
        ddp(torch.ones(2, 8))
    with contextlib.suppress(gs.GradSyncError):
        sync.detach()


def test_a_wrapped_model_is_not_called_through_its_wrapper_once_attached(run: Run) -> None:
    run(attach_wrapped)


def attached_inside_of_anothers_forward() -> None:
    """A wrapped generator calls an attached critic: two models."""
    critic = nn.Linear(2, 1)
    sync = gs.attach(critic)

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model()
            self.critics = [critic]  # not registered

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.critics[0](self.body(x))

    ddp = DistributedDataParallel(Generator())
    ddp(torch.full((2, 8), float(dist.get_rank()))).sum().backward()
    total = critic.weight.grad.clone()  # type: ignore[union-attr]
    dist.all_reduce(total)
    assert torch.equal(total, 2 * critic.weight.grad)  # type: ignore[operator]
    sync.detach()


def test_two_models_one_wrapped_one_attached(run: Run) -> None:
    run(attached_inside_of_anothers_forward)
