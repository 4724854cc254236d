"""Small models that many tests train, each with one trait of real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(x)))


class Branches(nn.Module):
    """Uses only the branch it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.tanh(self.trunk(x)))


class Scrambled(nn.Module):
    """Registered in another order than used."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(32, 4)
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Checkpointed(nn.Module):
    """A weight shared between checkpointed segments."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.shared = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 4)
        self.reentrant = reentrant

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(torch.tanh(self.inner(x))))

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.shared(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.segment, x.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(self.last, x, use_reentrant=self.reentrant)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_single = nn.Linear(8, 8)
        self.in_double = nn.Linear(8, 8).double()
        self.in_half = nn.Linear(8, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.in_single(x)).double()
        return self.in_half(torch.tanh(self.in_double(hidden)).bfloat16()).float()


class Scalar(nn.Module):
    """Its gradient is its input, so a test says what is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.other = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, gradient: float, other: float | None = None) -> torch.Tensor:
        self.seen += gradient
        return self.weight * gradient + (0 if other is None else self.other * other)


class Raises(torch.autograd.Function):
    """Passes everything on, and raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a user's own exception")


class Trapped(nn.Module):
    """Once armed it raises in the middle of its backward, when later layers have sent their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.second = nn.Linear(64, 64)
        self.third = nn.Linear(64, 4)
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(Raises.apply(hidden) if self.armed else hidden)))
