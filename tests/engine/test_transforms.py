"""`torch.func` through an attached model: per-sample gradients, derivatives by the input, Jacobians on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from models import mlp
from yardstick import Context, Scenario, assert_replicas_equal, assert_same, history


def per_sample_gradients(ctx: Context) -> torch.Tensor:
    params = {name: param.detach() for name, param in ctx.model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(ctx.model, params, (x[None],)).square().mean()

    x = ctx.batch(4, 8)
    norms = [each.flatten(1).norm(dim=1) for each in vmap(grad(loss), in_dims=(None, 0))(params, x).values()]
    return (ctx.forward(x).square().mean(dim=1) / (1 + torch.stack(norms).norm(dim=0))).mean()


def derivatives_by_the_input(ctx: Context) -> torch.Tensor:
    x = ctx.batch(4, 8)
    slope = grad(lambda x: ctx.forward(x).sum())(x)
    return slope.square().mean() + ctx.forward(x).square().mean()


def derivatives_only(ctx: Context) -> torch.Tensor:
    slope: torch.Tensor = vmap(grad(lambda x: ctx.forward(x).sum()))(ctx.batch(4, 8))
    return slope.square().mean()


def jacobians_on_rank_0(ctx: Context) -> torch.Tensor:
    x = ctx.batch(4, 8)
    if ctx.rank == 0:
        jacrev(ctx.forward)(x[0])
        hessian(lambda x: ctx.forward(x).sum())(x[0])
        jvp(ctx.forward, (x,), (x,))
        _, pull = vjp(ctx.forward, x)
        pull(torch.ones(4, 4))
    return ctx.forward(x).square().mean()


def mapped(ctx: Context) -> torch.Tensor:
    out: torch.Tensor = vmap(ctx.forward)(ctx.batch(4, 8))
    return out.square().mean()


LOSSES: list[Callable[[Context], torch.Tensor]] = [
    per_sample_gradients,
    derivatives_by_the_input,
    derivatives_only,
    jacobians_on_rank_0,
    mapped,
]


def compare(loss: Callable[[Context], torch.Tensor]) -> None:
    def step(ctx: Context) -> None:
        loss(ctx).backward()
        ctx.synced()
        ctx.opt.step()
        ctx.opt.zero_grad()

    scenario = Scenario(mlp, step)
    ours = history(scenario, "gradsync")
    assert_same(ours, history(scenario, "by hand"), exact=dist.get_world_size() == 2)
    assert_replicas_equal(ours[-1])


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_what_torch_func_derives_is_no_backward_of_the_step(
    loss: Callable[[Context], torch.Tensor], run: Callable[..., Any]
) -> None:
    run(compare, loss)
