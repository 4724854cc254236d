"""A model that is dropped without `detach()` is gone, parameters, threads and descriptors; and nobody waits for it."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

import gradsync as gs
from gradsync.launch.spawn import RankPool

Run = Callable[..., list[Any]]
PLANS: dict[str, gs.Plan] = {
    "default": gs.Plan(),
    "int8": gs.Plan(compress=gs.int8()),
    "powersgd": gs.Plan(compress=gs.powersgd(2)),
    "native": gs.Plan(algorithm=gs.native()),
    "ring": gs.Plan(algorithm=gs.ring()),
    "accumulate": gs.Plan(pace=gs.accumulate(2)),
    "delayed": gs.Plan(pace=gs.delayed(1)),
    "local_sgd": gs.Plan(pace=gs.local_sgd(2)),
    "diloco": gs.Plan(pace=gs.diloco(2)),
    "gossip": gs.Plan(pace=gs.gossip()),
}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int = 4) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8) + dist.get_rank()).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()


def held() -> tuple[set[str], int]:
    """This process's threads and descriptors."""
    return set(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def wait_until_gone(references: list[weakref.ref[Any]], before: tuple[set[str], int]) -> None:
    """The thread that ends the rest comes by four times a second."""
    deadline = time.monotonic() + 30
    while True:
        gc.collect()
        kept = [reference for reference in references if reference() is not None]
        threads, descriptors = held()
        if not kept and len(threads) <= len(before[0]) and descriptors <= before[1]:
            return
        assert time.monotonic() < deadline, (len(kept), threads - before[0], before[1], descriptors)
        time.sleep(0.05)


def train_and_forget(plan: gs.Plan, with_optimizer: bool = True) -> list[weakref.ref[Any]]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if with_optimizer else None
    sync = gs.attach(model, optimizer, plan)
    train(model, optimizer)
    memory = [bucket.flat.untyped_storage() for bucket in sync._synchronization.bucket_order.buckets]
    return [weakref.ref(each) for each in (*model.parameters(), model, sync, *memory)]


def forget(name: str) -> None:
    gs.attach(nn.Linear(1, 1)).detach()  # what the process keeps from its first synchronization on
    dist.barrier()
    before = held()
    for _ in range(2):
        wait_until_gone(train_and_forget(PLANS[name]), before)
        dist.barrier()


@pytest.mark.parametrize("name", PLANS)
def test_a_dropped_model_leaves_nothing(name: str, run: Run) -> None:
    run(forget, name)


def forget_without_an_optimizer() -> None:
    gs.attach(nn.Linear(1, 1)).detach()
    dist.barrier()
    before = held()
    wait_until_gone(train_and_forget(PLANS["default"], with_optimizer=False), before)
    dist.barrier()


def test_nor_does_one_without_an_optimizer(run: Run) -> None:
    run(forget_without_an_optimizer)


def forget_several() -> None:
    """Two in one backward, with a scaler that lives on and steps for the next model."""
    gs.attach(nn.Linear(1, 1)).detach()
    dist.barrier()
    scaler, before = GradScaler("cpu", init_scale=4.0), held()

    def train_two() -> list[weakref.ref[Any]]:
        models = [mlp(), mlp()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            gs.attach(model, optimizer, scaler=scaler)
        for _ in range(3):
            x = torch.randn(4, 8) + dist.get_rank()
            scaler.scale(models[0](x).sum() + models[1](x).sum()).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return [weakref.ref(param) for model in models for param in model.parameters()]

    for _ in range(2):
        wait_until_gone(train_two(), before)
        dist.barrier()


def test_nor_do_several_in_one_backward(run: Run) -> None:
    run(forget_several)


def keep_the_model_only() -> tuple[bool, bool]:
    """Whether replicas stay equal after the handle was dropped, and whether a user's hook still sees the average."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = weakref.ref(gs.attach(model, optimizer))
    gc.collect()
    assert sync() is None
    seen: list[torch.Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    torch.manual_seed(dist.get_rank())
    train(model, optimizer)
    weights = torch.cat([param.detach().flatten() for param in model.parameters()] + [seen[-1].flatten()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    return torch.equal(*others), len(seen) == 4


def test_a_model_whose_handle_was_dropped_goes_on_training(run: Run) -> None:
    assert run(keep_the_model_only) == [(True, True)] * 2


def keep_a_part_only() -> bool:
    """What was attached was a list around the parts, which nobody keeps: neither that nor the handle."""
    first, second = mlp(), mlp()
    gs.attach(nn.ModuleList([first, second]))
    gc.collect()
    torch.manual_seed(dist.get_rank())
    second(torch.randn(4, 8)).sum().backward()
    first(torch.randn(4, 8)).sum().backward()
    grads = torch.cat([param.grad.flatten() for param in first.parameters()])  # type: ignore[union-attr]
    others = [torch.empty_like(grads) for _ in range(dist.get_world_size())]
    dist.all_gather(others, grads)
    return torch.equal(*others)


def test_parts_of_it_keep_the_synchronization(run: Run) -> None:
    with warnings.catch_warnings():
        assert run(keep_a_part_only) == [True] * 2


def copies() -> list[bool]:
    model = mlp()
    sync = gs.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, None, steps=2)
    file = io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    pickled = pickle.dumps(model)
    twins = [copy.deepcopy(model), pickle.loads(pickled)]  # noqa: S301  # our own
    for twin in twins:
        twin(torch.randn(4, 8) + dist.get_rank()).square().mean().backward()  # alone
    results = [
        all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items()),
        b"gradsync" not in pickled,
        all(
            torch.equal(one, two)
            for twin in twins
            for one, two in zip(model.parameters(), twin.parameters(), strict=True)
        ),
        all(not hasattr(param, "_kept_for_hooks") for param in twins[0].parameters()),
    ]
    sync.detach()
    results.append(all(not vars(param) for param in model.parameters()))
    return results


def test_copies_are_not_attached_and_detach_leaves_no_attribute(run: Run) -> None:
    for results in run(copies):
        assert all(results), results


def drop_while_an_average_is_under_way(algorithm: str) -> None:
    """Rank 1 has dropped its model when rank 0 takes its last step, for which it needs what is under way."""
    gs.attach(nn.Linear(1, 1)).detach()
    dist.barrier()
    before = held()

    def train_apart() -> list[weakref.ref[Any]]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(1), algorithm=PLANS[algorithm].algorithm))
        train(model, optimizer, steps=3)
        if dist.get_rank() == 0:
            dist.barrier()
        train(model, optimizer, steps=1)
        return [weakref.ref(param) for param in model.parameters()]

    references = train_apart()
    if dist.get_rank() == 1:
        gc.collect()
        if algorithm != "ring":  # whose thread goes on with it
            assert [reference() for reference in references] == [None] * 4
        dist.barrier()
    wait_until_gone(references, before)
    dist.barrier()


@pytest.mark.parametrize("algorithm", ["default", "native", "ring"])
def test_what_is_under_way_comes_to_its_end(algorithm: str, run: Run) -> None:
    run(drop_while_an_average_is_under_way, algorithm)


# One rank drops its model, the other keeps its own


def drop_on_rank_1(second_model: bool) -> tuple[str, bool]:
    """What rank 0 hears, and whether another model trains meanwhile."""
    kept, dropped = mlp(), mlp()
    if second_model:
        gs.attach(kept)
    sync = gs.attach(dropped, guard=gs.Guard(timeout=60))
    train(dropped, None, steps=2)
    said = ""
    if dist.get_rank() == 1:
        reference = weakref.ref(dropped[0].weight)
        del dropped, sync
        gc.collect()
        assert reference() is None
    else:
        try:
            train(dropped, None, steps=2)
        except gs.GradSyncError as error:
            said = f"{type(error).__name__}: {error}"
    if second_model:
        train(kept, None)
    return said, True


@pytest.fixture(scope="module")
def run_apart(warm: Any) -> Iterator[Any]:
    """Ranks of their own: what rank 0 launched stays under way until its process ends."""
    with RankPool(2, threads=1, context=warm) as ranks:
        ranks.run(dist.get_rank)
        yield ranks.run


@pytest.mark.parametrize("second_model", [False, True])
def test_who_keeps_a_model_that_another_dropped_hears_of_it(second_model: bool, run_apart: Run) -> None:
    said, _ = run_apart(drop_on_rank_1, second_model)[0]
    assert re.fullmatch(
        r"PeerLost: \[rank 0/2 step 2 bucket 0\] rank 1 \(pid \d+\) left in step 2, while this rank was in bucket 0 .*",
        said,
    ), said
