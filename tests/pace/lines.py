"""Models whose gradient is the input, so that parameters can be written down; trained with a step of 1 from 1."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs

GRADIENTS = [[1.0, 2.0], [3.0, 4.0]]  # of a and b: rank 0's and rank 1's, in every step


class Line(torch.nn.Module):
    """a·x + b·y: the gradient of a is x, of b is y."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(width))
        self.b = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.a * x + self.b * y).sum()


class Run:
    """A line in training."""

    def __init__(self, plan: gs.Plan, width: int = 1, momentum: float = 0.0, **attach: Any) -> None:
        self.model = Line(width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=momentum)
        self.sync = gs.attach(self.model, self.optimizer, plan, **attach)
        self.rank = dist.get_rank()

    @property
    def values(self) -> list[float]:
        """The first elements of a and of b."""
        return [float(self.model.a.detach()[0]), float(self.model.b.detach()[0])]

    def step(self, x: Any = None, y: Any = None, steps: bool = True) -> list[float]:
        """One step with these gradients; `steps` False: as a GradScaler that found an infinity."""
        default = GRADIENTS[self.rank % 2]
        x, y = default[0] if x is None else x, default[1] if y is None else y
        self.model(torch.as_tensor(x), torch.as_tensor(y)).backward()
        if steps:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self.values

    def steps(self, num: int) -> list[list[float]]:
        """The values after each of so many steps."""
        return [self.step() for _ in range(num)]

    def random_step(self, t: int) -> list[float]:
        """Gradients of small whole numbers, of this rank and step."""
        width, data = self.model.a.numel(), torch.Generator().manual_seed(100 * t + self.rank)
        x, y = torch.randint(-8, 9, (2, width), generator=data).float()
        return self.step(x, y)

    def parameters(self) -> torch.Tensor:
        """All of them, as a copy."""
        return torch.cat([self.model.a.detach(), self.model.b.detach()]).clone()

    def drain(self) -> list[float]:
        assert not self.sync.drain()
        return self.values


def check_continuation(plan: gs.Plan, cuts: Iterable[int], total: int) -> None:
    """Saved after each of `cuts` steps and continued, a run is the one that was never interrupted."""
    whole, saved = Run(plan, width=48, momentum=0.5), {}
    template = {key: tensor.shape for key, tensor in whole.sync.state_dict().items()}
    for t in range(total):
        if t in cuts:
            state = whole.sync.state_dict()
            assert {key: tensor.shape for key, tensor in state.items()} == template
            saved[t] = deepcopy((whole.model.state_dict(), whole.optimizer.state_dict(), state))
        whole.random_step(t)
    end = whole.sync.state_dict()
    for cut, (model, optimizer, state) in saved.items():
        second = Run(plan, width=48, momentum=0.5)
        second.model.load_state_dict(model)
        second.optimizer.load_state_dict(optimizer)
        second.sync.load_state_dict(state)
        for t in range(cut, total):
            second.random_step(t)
        assert torch.equal(second.parameters(), whole.parameters()), f"saved after {cut} steps"
        for key, tensor in second.sync.state_dict().items():
            assert torch.equal(tensor.nan_to_num(), end[key].nan_to_num()), f"{key}, saved after {cut} steps"
        second.sync.detach()
    whole.sync.detach()


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's."""
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor.contiguous())
    return everyones


def assert_equal_on_all_ranks(run: Run) -> None:
    first, *others = gathered(run.parameters())
    assert all(torch.equal(first, other) for other in others)


def heard(call: Callable[[], Any]) -> list[str]:
    """What is warned of during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def raised(call: Callable[[], Any]) -> str:
    """The error that a call ends with, as text."""
    try:
        call()
    except gs.GradSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
