"""Another default device or dtype is the user's affair: all of ours works the same under it."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.launch.spawn import RankPool
from gradsync.plan.paces import AsyncSGD

Run = Callable[..., list[Any]]
F32 = {"dtype": torch.float32, "device": "cpu"}
SOURCES = sorted(Path(gs.__file__).parent.rglob("*.py"))
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros",
}  # fmt: skip
BY_DEFAULT_DTYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}


@contextlib.contextmanager
def foreign(default: str) -> Iterator[None]:
    """Under such defaults; then as before."""
    if default == "with":
        with torch.device("meta"):
            yield
    elif default == "device":
        torch.set_default_device("meta")
        try:
            yield
        finally:
            torch.set_default_device(None)
    else:
        torch.set_default_dtype(getattr(torch, default))
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


DEFAULTS = ["device", "with", "float64", "bfloat16"]


def build(sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(16, 8, sparse=sparse), nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 40)
    )
    model.append(nn.Linear(40, 3).bfloat16())
    return model


class Net(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.parts = build(sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[5](self.parts[:5](x).bfloat16())


def numbers(step: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * dist.get_rank() + step)
    return torch.randint(16, (4,), generator=generator, device="cpu")


def train(plan: gs.Plan, default: str | None) -> list[torch.Tensor]:
    """A model of two dtypes with a sparse layer; a checkpoint in the middle, some weights, some rank without a loss."""
    model = Net(not isinstance(plan.pace, AsyncSGD))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foreign(default) if default else contextlib.nullcontext():
        sync = gs.attach(model, optimizer, plan, guard=gs.Guard(timeout=30, drift="raise"))
        for step in range(5):
            model(numbers(step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                if isinstance(plan.pace, AsyncSGD):
                    sync.drain()
                sync.load_state_dict(sync.state_dict())
                sync.load_state_dict(sync.state_dict(all_ranks=True))
        while sync.drain():
            optimizer.step()
            optimizer.zero_grad()
        sync.broadcast(1)
        sync.stats()
        sync.residuals()
        sync.detach()
    return [param.detach() for param in model.parameters()]


def check(plan: gs.Plan, default: str) -> None:
    for theirs, ours in zip(train(plan, None), train(plan, default), strict=True):
        assert torch.equal(theirs, ours)


PLANS = {
    "default": gs.Plan(),
    "small buckets": gs.Plan(bucket_bytes=1024),
    "ring": gs.Plan(algorithm=gs.ring()),
    "hierarchical": gs.Plan(algorithm=gs.hierarchical()),
    "bf16": gs.Plan(compress=gs.bf16()),
    "int8": gs.Plan(compress=gs.int8(), audit_every=2),
    "int4": gs.Plan(compress=gs.int4()),
    "sign": gs.Plan(compress=gs.warmup(gs.sign(), 2)),
    "topk": gs.Plan(compress=gs.topk(0.1)),
    "randomk": gs.Plan(compress=gs.randomk(0.1)),
    "powersgd": gs.Plan(compress=gs.powersgd(2)),
    "by parameter": gs.Plan(compress=gs.by_parameter([gs.rule("*weight", compress=gs.powersgd(1))])),
    "accumulate": gs.Plan(pace=gs.accumulate(2)),
}
DENSE_PACES = {
    "delayed": gs.Plan(pace=gs.delayed(1)),
    "delayed, compressed": gs.Plan(pace=gs.delayed(1), compress=gs.int8()),
    "local_sgd": gs.Plan(pace=gs.local_sgd(2)),
    "local_sgd, compressed": gs.Plan(pace=gs.local_sgd(2), compress=gs.int8()),
    "diloco": gs.Plan(pace=gs.diloco(2)),
}


@pytest.mark.parametrize("default", ["device", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS | DENSE_PACES)
def test_every_plan_trains_the_same_bits(plan: str, default: str, run: Run) -> None:
    run(check, (PLANS | DENSE_PACES)[plan], default)


def asynchronously(pace: gs.Plan, default: str) -> None:
    train(pace, default)


@pytest.mark.parametrize("default", DEFAULTS)
def test_paces_without_an_order_run_too(default: str, run: Run) -> None:
    run(asynchronously, gs.Plan(pace=gs.async_sgd(max_staleness=1)), default)
    run(asynchronously, gs.Plan(pace=gs.gossip()), default)


def call_everything(default: str, folder: Path) -> None:
    """What is public and is no plan."""
    rank = dist.get_rank()
    with foreign(default):
        tensor = torch.full((1000,), 1.0 + rank, **F32)
        assert gs.all_reduce(tensor, op="mean") is tensor
        assert torch.equal(tensor, torch.full((1000,), 1.5, **F32))
        gs.all_reduce(torch.full((70, 70), 1.0 + rank, **F32), compress=gs.powersgd(2))
        shared = gs.shared_empty((64, 64), dtype=torch.float32)
        assert shared.device.type == "cpu"
        gs.all_reduce(shared.fill_(rank))
        assert torch.equal(shared, torch.full((64, 64), 0.5, **F32))
        model = nn.Linear(8, 8, **F32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(4, 8, **F32)
        profiled = gs.profile(model, lambda: model(batch).sum().backward())
        assert profiled.gradients
        sync = gs.attach(model, optimizer, gs.auto(steps=2), trace=folder / "trace")
        for _ in range(6):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.detach()
        ddp = DistributedDataParallel(nn.Linear(8, 8, **F32))
        watch = gs.observe(ddp, trace=folder / "observed")
        for _ in range(3):
            ddp(batch).sum().backward()
        watch.close()
        hooked = DistributedDataParallel(nn.Linear(8, 8, **F32))
        state, hook = gs.ddp_hook(gs.Plan(compress=gs.int8()), hooked)
        hooked.register_comm_hook(state, hook)
        for _ in range(3):
            hooked(batch).sum().backward()


@pytest.mark.parametrize("default", DEFAULTS)
def test_everything_else_works_too(default: str, run: Run, tmp_path: Path) -> None:
    run(call_everything, default, tmp_path)


def sum_of_ranks() -> float:
    with torch.device("meta"):
        return float(gs.all_reduce(torch.full((3,), 1.0 + dist.get_rank(), **F32), op="sum")[0])


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_pool_starts_ranks_and_brings_their_values(default: str, warm: ForkServerContext) -> None:
    with foreign(default), RankPool(2, context=warm) as pool:
        assert pool.run(sum_of_ranks) == [3.0, 3.0]


def test_spawn_starts_processes_that_import_all_anew() -> None:
    """They know nothing of a default of ours, so one is as good as another."""
    with foreign("with"):
        assert gs.spawn(sum_of_ranks, 2, timeout=60) == [3.0, 3.0]


def unnamed(path: Path) -> list[str]:
    """Calls in a file that leave the device, or a floating dtype, to the defaults."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and name in MAKERS):
            continue
        if "device" not in given or (name in BY_DEFAULT_DTYPE and "dtype" not in given):
            found.append(f"{path}:{node.lineno} torch.{name}")
    return found


def test_every_tensor_of_the_library_names_its_device_and_dtype() -> None:
    """The demo and bench are programs of their own: nobody sets defaults before them."""
    library = [path for path in SOURCES if not {"bench", "story"} & set(path.parts)]
    assert len(library) > 200
    assert [each for path in library for each in unnamed(path)] == []
