"""Compilers around and inside the model: the bits of DDP, or one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsync as gs
from yardstick import Context, Scenario, assert_same, history

Run = Callable[..., list[Any]]
How = Literal["whole", "in place", "blocks"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh() + x


class Net(nn.Module):
    """With a parameter that no loss uses, and blocks that may be checkpointed."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(8, 40), nn.Linear(40, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.last(x)


def compiled(model: Any, how: How) -> Any:
    if how == "whole":
        return torch.compile(model, backend="aot_eager", fullgraph=True)
    for module in [model] if how == "in place" else model.blocks:
        module.compile(backend="aot_eager", fullgraph=True)
    return model


def step(ctx: Context) -> None:
    ctx.forward(ctx.batch(4, 8)).square().mean().backward()
    ctx.synced()
    ctx.opt.step()
    ctx.opt.zero_grad()


def check(how: How, recomputes: bool) -> None:
    torch._dynamo.reset()
    scenario = Scenario(lambda: Net(recomputes), step, wrap=lambda model: compiled(model, how))
    by_hand = history(scenario, "by hand")
    torch._dynamo.reset()
    assert_same(history(scenario, "gradsync"), by_hand, exact=True)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("how", ["whole", "in place", "blocks"])
def test_a_compiled_model_trains_as_averaged_by_hand(how: How, recomputes: bool, run: Run) -> None:
    run(check, how, recomputes)


@contextlib.contextmanager
def compiled_autograd(by: str) -> Iterator[None]:
    if by == "config":
        with torch._dynamo.config.patch(compiled_autograd=True):
            yield
    else:
        from torch._dynamo.compiled_autograd import _enable

        with _enable(torch.compile(backend="aot_eager")):
            yield


def in_one(model: nn.Module) -> Callable[[torch.Tensor], None]:
    def forward_and_backward(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    return forward_and_backward


def refuse(by: str, called: str) -> list[str]:
    """What two steps under compiled autograd raise."""
    torch._dynamo.reset()
    model = Net(recomputes=False)
    sync = gs.attach(model)
    parts = nn.Sequential(model.first, model.last)
    train = in_one(model if called == "model" else parts)
    sentences = []
    for _ in range(2):
        with compiled_autograd(by), pytest.raises(gs.GradSyncError) as caught:
            (torch.compile(train, backend="aot_eager") if by == "config" else train)(torch.randn(4, 8))
        sentences.append(str(caught.value))
    sync.detach()
    return sentences


@pytest.mark.parametrize("called", ["model", "parts"])
@pytest.mark.parametrize("by", ["config", "context"])
def test_compiled_autograd_is_refused_in_the_first_step(by: str, called: str, run: Run) -> None:
    for rank, (first, second) in enumerate(run(refuse, by, called)):
        assert first == (
            f"[rank {rank}/2 step 0] compiled autograd runs this backward, and does not say when it has ended: switch "
            "it off (torch._dynamo.config.compiled_autograd = False), or call backward() outside of what is compiled; "
            "torch.compile of the model or of its blocks works"
        )
        assert second == first


def weigh_differently(how: How) -> str:
    model = Net(False)
    sync = gs.attach(model, plan=gs.Plan(pace=gs.accumulate(2)))
    forward = compiled(model, how)
    said = ""
    for weight in (1.0, 3.0):
        sync.set_batch_weight(weight)
        try:
            forward(torch.ones(2, 8)).square().mean().backward()
        except gs.GradSyncError as error:
            said = str(error)
    sync.detach()
    return said


def test_what_a_compiled_model_cannot_tell_its_blocks_can(run: Run) -> None:
    assert all("compile its blocks instead" in said for said in run(weigh_differently, "whole"))
    assert run(weigh_differently, "blocks") == ["", ""]
