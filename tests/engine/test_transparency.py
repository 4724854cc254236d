"""The most important tests: the same gradients and weights with and without us.

Each scenario is something a real model does. With two ranks and exact averaging, gradsync, DDP and averaging by hand
give the same bits; with three, the same up to the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from models import Branches, Checkpointed, Convolution, MixedTypes, Scrambled, Tied, mlp
from yardstick import Context, Scenario, assert_replicas_equal, assert_same, history, plain_step


def unoptimized_step(ctx: Context) -> None:
    """A compiler that optimizes from the third call on would change bits by itself."""
    with torch.jit.optimized_execution(False):
        plain_step(ctx)


# Steps


def some_branches(ctx: Context) -> None:
    """Steps 0..: another branch per rank, the same on all, one that nobody uses, another per rank again."""
    branch = [ctx.rank % 2, 0, 1, (ctx.rank + 1) % 3, 2][ctx.step % 5]
    ctx.forward(ctx.batch(6, 8), branch).square().mean().backward()
    ctx.synced()
    ctx.opt.step()
    ctx.opt.zero_grad()


def branches_without_zero_grad(ctx: Context) -> None:
    ctx.forward(ctx.batch(6, 8), (ctx.rank + ctx.step) % 3).square().mean().backward()
    ctx.synced()
    ctx.opt.step()
    if ctx.step % 2:
        ctx.opt.zero_grad()


def branches_accumulated(ctx: Context) -> None:
    """Two micro-batches by no_sync; the second may leave out what the first used."""
    with _no_sync(ctx):
        ctx.forward(ctx.batch(6, 8), ctx.rank % 3).square().mean().backward()
    ctx.forward(ctx.batch(6, 8), 2).square().mean().backward()
    ctx.synced()
    ctx.opt.step()
    ctx.opt.zero_grad()


def two_backwards(ctx: Context) -> None:
    for _ in range(2):
        ctx.forward(ctx.batch(6, 8)).square().mean().backward()
        ctx.synced()
    ctx.opt.step()
    ctx.opt.zero_grad()


def retained_graph(ctx: Context) -> None:
    loss = ctx.forward(ctx.batch(6, 8)).square().mean()
    loss.backward(retain_graph=True)
    ctx.synced()
    loss.backward()
    ctx.synced()
    ctx.opt.step()
    ctx.opt.zero_grad()


def zeros_instead_of_none(ctx: Context) -> None:
    ctx.forward(ctx.batch(6, 8)).square().mean().backward()
    ctx.synced()
    ctx.opt.step()
    ctx.opt.zero_grad(set_to_none=False)


def clipped(ctx: Context) -> None:
    ctx.forward(ctx.batch(6, 8)).square().mean().backward()
    ctx.synced()
    torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), 0.01)
    ctx.opt.step()
    ctx.opt.zero_grad()


def froze_and_thawed(ctx: Context) -> None:
    """Frozen from step 1, thawed in step 3, another one frozen then."""
    ctx.model[2].weight.requires_grad_(ctx.step not in (1, 2))
    ctx.model[0].bias.requires_grad_(ctx.step < 3)
    plain_step(ctx)


def in_channels_last(ctx: Context) -> None:
    x = ctx.batch(4, 3, 8, 8).to(memory_format=torch.channels_last)
    ctx.forward(x).square().mean().backward()
    ctx.synced()
    for name, param in ctx.model.named_parameters():
        assert param.grad is not None
        assert param.grad.stride() == param.stride(), f"{name}: another layout than the parameter"
    ctx.opt.step()
    ctx.opt.zero_grad()


def two_optimizers(ctx: Context) -> None:
    ctx.forward(ctx.batch(6, 8)).square().mean().backward()
    ctx.synced()
    for optimizer in ctx.optimizers:
        optimizer.step()
    for optimizer in ctx.optimizers:
        optimizer.zero_grad()


def _no_sync(ctx: Context) -> Any:
    if ctx.kind == "ddp":
        return ctx.forward.no_sync()
    if ctx.sync is not None:
        return ctx.sync.no_sync()
    return torch.enable_grad()


def _frozen_mlp() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def _groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = model.parameters()
    return [
        torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest[:2], "lr": 0.01}], lr=0.0, momentum=0.9),
        torch.optim.AdamW(rest[2:], lr=1e-2),
    ]


def _channels_last() -> nn.Module:
    return Convolution().to(memory_format=torch.channels_last)


def _scripted_part() -> nn.Module:
    part = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
    return nn.Sequential(torch.jit.script(part), nn.Linear(16, 4))


UNUSED = {"find_unused_parameters": True}

SCENARIOS: dict[str, Scenario] = {
    "a plain network": Scenario(mlp, plain_step),
    "no overlap": Scenario(mlp, plain_step, plan=gs.Plan(overlap="none")),
    "one bucket": Scenario(mlp, plain_step, plan=gs.Plan(bucket_bytes=1 << 20)),
    "tied weights": Scenario(Tied, plain_step),
    "frozen parameters": Scenario(_frozen_mlp, plain_step),
    # DDP fixes at construction what requires a gradient
    "frozen and thawed later": Scenario(mlp, froze_and_thawed, ddp=None),
    "unused on some ranks": Scenario(Branches, some_branches, ddp=UNUSED),
    "unused, gradients kept": Scenario(Branches, branches_without_zero_grad, ddp=UNUSED),
    # DDP's unused-parameter search forgets what no_sync accumulated
    "unused under accumulation": Scenario(Branches, branches_accumulated, ddp=None),
    "several backwards per step": Scenario(mlp, two_backwards),
    "a retained graph": Scenario(mlp, retained_graph, ddp=None),
    "checkpointing": Scenario(lambda: Checkpointed(False), plain_step),
    # DDP refuses a weight shared between reentrant segments
    "reentrant checkpointing": Scenario(lambda: Checkpointed(True), plain_step, ddp=None),
    "mixed dtypes": Scenario(MixedTypes, plain_step),
    "channels last and BatchNorm": Scenario(_channels_last, in_channels_last),
    "zero_grad(set_to_none=False)": Scenario(mlp, zeros_instead_of_none),
    "clipping": Scenario(mlp, clipped),
    "two optimizers and groups": Scenario(mlp, two_optimizers, optimizers=_groups),
    "registered in another order": Scenario(Scrambled, plain_step),
    "a part compiled by torch.jit": Scenario(_scripted_part, unoptimized_step),
    "blocks compiled": Scenario(mlp, plain_step, ddp=None, wrap=lambda model: _compile_blocks(model)),
    "whole model compiled": Scenario(
        mlp, plain_step, ddp=None, wrap=lambda model: torch.compile(model, backend="aot_eager")
    ),
}


def _compile_blocks(model: nn.Module) -> nn.Module:
    for block in model:
        block.compile(backend="aot_eager")
    return model


def check_scenario(name: str) -> None:
    scenario = SCENARIOS[name]
    exact = dist.get_world_size() == 2
    ours = history(scenario, "gradsync")
    assert_same(ours, history(scenario, "by hand"), exact)
    if scenario.ddp is not None:
        assert_same(ours, history(scenario, "ddp"), exact)
    assert_replicas_equal(ours[-1])


@pytest.mark.parametrize("name", SCENARIOS)
def test_gradsync_changes_nothing_but_the_average(name: str, run: Callable[..., Any]) -> None:
    run(check_scenario, name, ranks=2)


@pytest.mark.parametrize("name", ["a plain network", "unused on some ranks", "frozen and thawed later"])
def test_it_holds_for_three_ranks_up_to_the_order_of_additions(name: str, run: Callable[..., Any]) -> None:
    run(check_scenario, name, ranks=3)
