"""What tests of drift share: a small training run, and something that happens to one replica in the middle of it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.trace.lines import Health

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Told(NamedTuple):
    """What a rank saw of a run."""

    lines: list[tuple[int, str, list[int], str | None, int | None, str]]
    warned: list[str]
    raised: str
    stats: dict[str, Any]
    digest: float  # of all it holds in the end, as a sum of bits

    @property
    def whats(self) -> list[str]:
        return [what for _, what, *_ in self.lines]


class Mixed(nn.Module):
    """Parameters of several dtypes, whose gradients do not depend on them; the last is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Parameter(torch.randn(23, 11))
        self.fp64 = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.fp16 = nn.Parameter(torch.randn(3, 5, 2).half())
        self.bf16 = nn.Parameter(torch.randn(33).bfloat16())
        self.frozen = nn.Parameter(torch.randn(19), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for param in self.parameters():
            total = total + (param.float() * x.sum()).sum()
        return total


Happening = Callable[[nn.Module, torch.optim.Optimizer], None]


def train(
    happening: Happening | None = None,
    at: int = 3,
    rank: int = 1,
    steps: int = 70,
    guard: gs.Guard | None = None,
    model: nn.Module | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=1e-2),
    still_after: int | None = None,  # from this step on the optimizer does not step: nothing heals by itself
    plan: gs.Plan | None = None,
) -> Told:
    """So many steps; after step `at` something happens to one rank."""
    torch.manual_seed(5)
    model = Mixed() if model is None else model
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    sync = gs.attach(model, opt, plan, guard=guard)
    lines: list[Health] = []
    sync._synchronization.health_log.listen(lines.append)
    generator = torch.Generator().manual_seed(dist.get_rank())
    raised = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in range(steps):
                model(torch.randn(3, generator=generator)).backward()
                if still_after is None or step <= still_after:
                    opt.step()
                opt.zero_grad()
                if step == at and happening is not None and dist.get_rank() == rank:
                    happening(model, opt)
        except gs.GradSyncError as error:
            raised = f"{type(error).__name__}: {error}"
    told = [(line.step, line.what, line.ranks, line.parameter, line.count, line.text) for line in lines]
    stats = sync.stats()
    sync.detach()
    return Told(told, [str(each.message) for each in caught], raised, stats, holds(model, opt))


def holds(model: nn.Module, opt: torch.optim.Optimizer) -> float:
    states = [opt.state.get(param, {}) for param in model.parameters()]
    tensors = [*model.parameters(), *(state[key] for state in states for key in sorted(state))]
    return float(sum(bits(t).double().mul(i + 1).sum().item() for i, t in enumerate(tensors)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(BITS[tensor.element_size()])


class Flip(NamedTuple):
    """One bit of one element, of a parameter or of its optimizer state."""

    parameter: str
    key: str  # "" for the parameter itself
    element: int
    bit: int

    def __call__(self, model: nn.Module, opt: torch.optim.Optimizer) -> None:
        param = dict(model.named_parameters())[self.parameter]
        flat = bits(opt.state[param][self.key] if self.key else param).view(-1)
        flat[self.element] ^= torch.tensor(1).bitwise_left_shift(self.bit).to(flat.dtype)

    def index(self, model: nn.Module, key_shape: tuple[int, ...] | None = None) -> list[int]:
        shape = dict(model.named_parameters())[self.parameter].shape if key_shape is None else key_shape
        return [int(i) for i in torch.unravel_index(torch.tensor(self.element), shape)]


def random_flip(seed: int) -> Flip:
    rng = random.Random(seed)
    model = Mixed()
    name, param = rng.choice(list(model.named_parameters()))
    key = rng.choice(["", "exp_avg", "exp_avg_sq"]) if param.requires_grad else ""
    return Flip(name, key, rng.randrange(param.numel()), rng.randrange(8 * param.element_size()))
