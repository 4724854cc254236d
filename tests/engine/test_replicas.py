"""Replicas begin as rank 0's: parameters, buffers and optimizer state, whatever their dtype, shape and strides."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

import gradsync as gs
from gradsync.engine import replicas


class Zoo(nn.Module):
    """Every kind of tensor, in an order that puts wide types on odd bytes."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        torch.manual_seed(rank)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.strided = nn.Parameter(torch.randn(6)[::2])
        self.bfloat = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.imaginary = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("flags", torch.tensor([rank == 0, True, rank != 0]))
        self.register_buffer("wide", torch.randn(2, dtype=torch.float64))
        self.register_buffer("narrow", torch.tensor([rank + 7], dtype=torch.uint8))
        self.register_buffer("count", torch.tensor([rank + 2**40]))
        self.register_buffer("empty", torch.zeros(0))
        self.norm.num_batches_tracked += rank + 3

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


ALIKE = {"nothing", "empty", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}  # from the start


def bits(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def fingerprint(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def attach_zoo(chunk_nbytes: int) -> tuple[dict[str, int], dict[str, int], bool]:
    model, before_chunk = Zoo(), replicas._CHUNK_NBYTES
    before = fingerprint(model.tensors())
    places = {name: (id(t), t.data_ptr(), t.stride()) for name, t in model.tensors().items()}
    replicas._CHUNK_NBYTES = chunk_nbytes
    try:
        gs.attach(model).detach()
    finally:
        replicas._CHUNK_NBYTES = before_chunk
    stayed = places == {name: (id(t), t.data_ptr(), t.stride()) for name, t in model.tensors().items()}
    return before, fingerprint(model.tensors()), stayed


@pytest.mark.parametrize("chunk_nbytes", [64 << 20, 16], ids=["one message", "many messages"])
def test_parameters_and_buffers_become_rank_0s_in_place(chunk_nbytes: int, run: Any) -> None:
    ranks = run(attach_zoo, chunk_nbytes, ranks=3)
    first = ranks[0][0]
    assert all(ranks[1][0][name] != first[name] for name in first if name not in ALIKE)
    for _, after, stayed in ranks:
        assert after == first
        assert stayed, "the same tensors with the same memory and strides"


def broadcast_a_large_one() -> tuple[int, bool]:
    """The most memory taken at once, in bytes, and whether all is as on rank 0."""
    sync = gs.attach(nn.Linear(1, 1))
    large = torch.full((5_000_000,), float(dist.get_rank() + 1))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        replicas.broadcast_tensors(sync._lane, [large], 0, "a large one")
    most = now = 0
    for event in memory.profiler.kineto_results.events():  # type: ignore[union-attr]
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    sync.detach()
    return most, bool((large == 1.0).all())


def test_a_large_tensor_travels_from_and_to_where_it_lies(run: Any) -> None:
    for most, equal in run(broadcast_a_large_one):
        assert most < 1_000_000
        assert equal


def load_on_rank_0_and_broadcast() -> tuple[dict[str, int], dict[str, int], list[float]]:
    model = Zoo()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for tensor in model.tensors().values():
                tensor.copy_(torch.ones_like(tensor))
        optimizer.param_groups[0]["lr"] = 0.7
    loaded = fingerprint(model.tensors())
    sync.broadcast()
    sync.detach()
    return loaded, fingerprint(model.tensors()), [optimizer.param_groups[0]["lr"]]


def test_broadcast_brings_what_rank_0_loaded_later(run: Any) -> None:
    first, second = run(load_on_rank_0_and_broadcast)
    assert first[1] == second[1] == first[0]
    assert first[2] == second[2] == [0.7]


# Optimizers


def small() -> nn.Sequential:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Conv2d(2, 3, 3, bias=False).to(memory_format=torch.channels_last), nn.Linear(4, 4))  # type: ignore[call-overload]


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "AdamW":
        return AdamW(model.parameters(), lr=0.01)
    if kind == "Adam with a tensor as lr":
        return Adam(model.parameters(), lr=torch.tensor(0.01), amsgrad=True)
    return SGD(model.parameters(), lr=0.01, momentum=0.9)


def step_with(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A step on gradients that are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {k: bits(v) if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
        if p in optimizer.state
    ]


def attach_with_state(kind: str, on: int) -> tuple[Any, Any, Any, Any]:
    """Only rank `on` has trained before; then all attach and go on."""
    model = small()
    optimizer = make(kind, model)
    if dist.get_rank() == on:
        step_with(optimizer, 1)
        step_with(optimizer, 2)
    before = state_of(optimizer)
    gs.attach(model, optimizer).detach()
    after = state_of(optimizer)
    strides = [
        value.stride() == parameter.stride()
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    step_with(optimizer, 3)
    return before, after, all(strides), (fingerprint(dict(model.named_parameters())), state_of(optimizer))


@pytest.mark.parametrize("kind", ["AdamW", "Adam with a tensor as lr", "SGD"])
def test_optimizer_state_that_rank_0_alone_loaded_is_everywhere(kind: str, run: Any) -> None:
    first, second = run(attach_with_state, kind, 0)
    assert first[0], "rank 0 had a state"
    assert second[0] == []
    assert second[1] == first[1] == first[0]
    assert second[2], "state is made with its parameter's strides"
    assert second[3] == first[3], "the next step has the same bits"


def test_optimizer_state_that_rank_0_does_not_have_is_dropped(run: Any) -> None:
    first, second = run(attach_with_state, "AdamW", 1)
    assert second[0]
    assert second[1] == first[1] == []
    assert second[3] == first[3]


def attach_with_other_values(kind: str) -> tuple[list[str], Any]:
    model = small()
    optimizer = make(kind, model)
    group = optimizer.param_groups[0]
    if dist.get_rank() == 1:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(0.5)
        else:
            group["lr"] = 0.5
        if "betas" in group:
            group["betas"] = (0.5, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gs.attach(model, optimizer).detach()
    said = [str(each.message) for each in caught]
    return said, (type(group["lr"]).__name__, float(group["lr"]), group.get("betas"), type(group.get("betas")).__name__)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("AdamW", "betas, lr"), ("Adam with a tensor as lr", "betas, lr"), ("SGD", "lr")],
)
def test_other_hyper_parameters_become_rank_0s_and_are_named(kind: str, names: str, run: Any) -> None:
    first, second = run(attach_with_other_values, kind)
    assert first[0] == []
    (said,) = second[0]
    assert said == f"[rank 1/2 step 0] {kind.split()[0]} had other values than rank 0 for {names}; rank 0's are used"
    assert first[1] == second[1]


def attach_with_a_scheduler_on_rank_0() -> Any:
    model = small()
    optimizer = make("SGD", model)
    if dist.get_rank() == 0:
        StepLR(optimizer, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gs.attach(model, optimizer).detach()
    return optimizer.param_groups[0]["initial_lr"], [str(each.message) for each in caught]


def test_a_value_that_only_rank_0_has_is_given_to_the_others(run: Any) -> None:
    first, second = run(attach_with_a_scheduler_on_rank_0)
    assert first == (0.01, [])
    assert second[0] == 0.01
    assert "initial_lr" in second[1][0]


def attach_with_state_that_cannot_travel() -> str:
    model = small()
    optimizer = make("SGD", model)
    optimizer.state[next(model.parameters())]["history"] = {1, 2}
    try:
        gs.attach(model, optimizer).detach()
    except ValueError as error:
        return str(error)
    return "attached"


def test_state_that_cannot_travel_is_refused_by_every_rank(run: Any) -> None:
    first, second = run(attach_with_state_that_cannot_travel)
    assert first == second
    assert first.startswith("the state 'history' of SGD is a set, which cannot be sent to other ranks; attach before")


def attach_several() -> list[Any]:
    model = small()
    optimizers = [SGD(model[0].parameters(), lr=0.1 + dist.get_rank(), momentum=0.9), AdamW(model[1].parameters())]
    if dist.get_rank() == 0:
        for optimizer in optimizers:
            step_with(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gs.attach(model, optimizers).detach()
    return [optimizers[0].param_groups[0]["lr"], *map(state_of, optimizers)]


def test_each_of_several_optimizers_becomes_rank_0s(run: Any) -> None:
    first, second = run(attach_several)
    assert first == second
    assert all(first)


# Buffers with every synchronization


class Counting(nn.Module):
    """Counts its forwards in a buffer, in place or by a new tensor each time."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.in_place = in_place
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = dist.get_rank() + 1
        if self.in_place:
            self.count += step
        else:
            self.count = self.count + step
        return (self.weight * x).sum()


def count(in_place: bool, buffers: Any) -> list[int]:
    model = Counting(in_place)
    sync = gs.attach(model, buffers=buffers)
    found = []
    for _ in range(3):
        model(torch.full((2,), float(dist.get_rank()))).backward()
        found.append(int(model.count))
    sync.detach()
    return found


def test_buffers_follow_rank_0_with_every_synchronization(run: Any) -> None:
    assert run(count, True, "broadcast") == [[1, 2, 3]] * 2


def test_buffers_stay_each_ranks_own_if_told_so(run: Any) -> None:
    assert run(count, True, "none") == [[1, 2, 3], [2, 4, 6]]


def test_a_buffer_that_forward_replaces_follows_rank_0_too(run: Any) -> None:
    assert run(count, False, "broadcast") == [[1, 2, 3]] * 2


def keep_own_state() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model.own = nn.Parameter(torch.full((2 + rank,), 1.0))  # of another size on every rank
    optimizer = Adam(model.parameters(), lr=0.1)

    def step() -> None:
        (model(torch.ones(1, 3)).sum() + (rank + 1) * model.own.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    mine = optimizer.state[model.own]["exp_avg"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sync = gs.attach(model, optimizer, ignore=["own"])
    assert torch.equal(optimizer.state[model.own]["exp_avg"], mine)
    sync.broadcast()
    assert torch.equal(optimizer.state[model.own]["exp_avg"], mine)
    step()
    assert int(optimizer.state[model.own]["step"]) == 2
    sync.detach()


def test_optimizers_keep_what_they_have_of_ignored_parameters(run: Any) -> None:
    run(keep_own_state)
