"""What tests of compressed synchronization share: every compressor, and a model whose gradients are given numbers.

What a rank brings is known to the bit, so that laws can be checked without a second model beside the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.compress.recipe import Compressor

EVERY: dict[str, Compressor] = {
    "fp16": gs.fp16(),
    "bf16": gs.bf16(),
    "error_feedback(bf16)": gs.error_feedback(gs.bf16()),
    "int8": gs.int8(block=64),
    "int4": gs.int4(block=64),
    "stochastic": gs.int8(block=64, rounding="stochastic"),
    "sign": gs.sign(block=64),
    "topk": gs.topk(0.2, block=64),
    "randomk": gs.randomk(0.2),
    "powersgd": gs.powersgd(2),
    "warmup": gs.warmup(gs.int4(block=64), 3),
    "by_parameter": gs.by_parameter(
        [gs.rule(dims=1, compress=None), gs.rule("*first*", compress=gs.topk(0.2)), gs.rule(compress=gs.powersgd(2))]
    ),
    "across_hosts": gs.across_hosts(gs.int8()),
}
# Those that lose nothing for good. The others round, and forget.
WITH_FEEDBACK = [name for name in EVERY if name not in ("fp16", "bf16", "stochastic", "across_hosts")]

SHAPES: dict[str, tuple[int, ...]] = {
    "first": (40, 24),
    "second": (40, 40),
    "third": (40, 40),  # with the second one batch of matrices, where they share a bucket
    "bias": (40,),
    "odd": (7, 5, 3),
    "number": (),
}
Grads = dict[str, torch.Tensor]


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros_like(grad)) for name, grad in like.items()})

    def forward(self, grads: Grads) -> torch.Tensor:
        return sum(((self.weights[name] * grad.conj()).real.sum() for name, grad in grads.items()), torch.zeros(()))


def brings(step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Grads:
    """What a rank brings to a step; None: this one. Of different sizes, as gradients of layers are."""
    seed = 1000 * step + (dist.get_rank() if rank is None else rank)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 10.0**-i).to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def mean_of(step: int, dtype: torch.dtype = torch.float32) -> Grads:
    """The exact mean over the ranks, in double precision."""
    ranks = [brings(step, rank, dtype) for rank in range(dist.get_world_size())]
    return {name: torch.stack([each[name].double() for each in ranks]).mean(0) for name in SHAPES}


@contextmanager
def attached(model: nn.Module, compress: Compressor | None, **options: Any) -> Iterator[gs.GradSync]:
    """Attached by a plan of small buckets; `options` are the plan's, and `optimizer` and `guard` of attach."""
    optimizer, guard = options.pop("optimizer", None), options.pop("guard", None)
    plan = gs.Plan(**{"compress": compress, "bucket_bytes": 2048, **options})
    sync = gs.attach(model, optimizer, plan, guard=guard)
    yield sync
    sync.detach()


def backward(model: nn.Module, grads: Grads) -> Grads:
    """The averaged gradients of one synchronization."""
    model.zero_grad()
    model(grads).backward()
    return grads_of(model)


def grads_of(model: nn.Module) -> Grads:
    named = ((name.rpartition(".")[2], param.grad) for name, param in model.named_parameters())
    return {name: grad.detach().clone() for name, grad in named if grad is not None}


def left_over(sync: gs.GradSync) -> Grads:
    """The residuals of all ranks, added up; zeros where there is none."""
    mine, total = sync.residuals(), {}
    for name, param in ((entry.name, entry.param) for entry in sync._synchronization.entries):
        here = mine[name].double() if name in mine else torch.zeros(param.shape, dtype=torch.float64)
        dist.all_reduce(here)
        total[name.rpartition(".")[2]] = here
    return total


def add(total: Grads, more: Grads, factor: float = 1.0) -> None:
    """Add up in double precision."""
    for name, grad in more.items():
        total[name] = total.get(name, torch.zeros(grad.shape, dtype=torch.float64)) + factor * grad.double()


def assert_conserved(gave: Grads, took: Grads, left: Grads, what: str) -> None:
    """What was given is applied, or is in somebody's residual; up to the roundings of so many fp32 additions.

    A sum of bf16 is rounded to bf16 when all ranks' are in it, which no residual knows of.
    """
    rtol = 2.0**-8 if "bf16" in what else 1e-5
    for name in gave:
        atol = rtol * float(gave[name].abs().max() + left[name].abs().max())
        torch.testing.assert_close(
            took[name] + left[name], gave[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{what}, {name}: {m}"
        )


def assert_equal(ours: Grads, theirs: Grads, what: str) -> None:
    """To the bit."""
    assert ours.keys() == theirs.keys(), what
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), f"{what}: {name} differs"
