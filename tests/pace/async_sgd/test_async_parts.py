"""Shard, optimizer copy, payload and compensation, each by itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import GradSyncError
from gradsync.pace.async_sgd.mail import Mail
from gradsync.pace.async_sgd.messages import (
    REQUEST_TAG,
    MessageKind,
    OwnerAnswer,
    ShardMessage,
    pack,
    payload_tag,
    unpack,
    write,
)
from gradsync.pace.async_sgd.owner import Owner
from gradsync.pace.async_sgd.shard import Shard, partition
from gradsync.pace.async_sgd.staleness import Histogram
from gradsync.plan.paces import AsyncSGD


class Scaled(torch.optim.SGD):
    """A user's class with an __init__ and an attribute of its own."""

    def __init__(self, factor: float, *, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, lr=1.0)
        self.factor = factor

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.data -= self.factor * group["lr"] * parameter.grad


def one(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value]))


@given(nbytes=st.lists(st.integers(0, 100), max_size=30), num_shards=st.integers(1, 6))
def test_shards_hold_every_parameter_once_and_are_balanced(nbytes: list[int], num_shards: int) -> None:
    shards = partition(nbytes, num_shards)
    assert sorted(index for shard in shards for index in shard) == list(range(len(nbytes)))
    sizes = [sum(nbytes[index] for index in shard) for shard in shards]
    assert max(sizes) - min(sizes) <= max(nbytes, default=0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2]
)
def test_tensors_come_back_from_a_freight_as_they_were(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 2).to(dtype), None, torch.randn(4, 6).to(dtype).t(), torch.zeros(0, 3).to(dtype)]
    like = [torch.empty(shape, dtype=dtype) for shape in ((3, 2), (5,), (6, 4), (0, 3))]
    back = unpack(pack(tensors), like)
    assert back[1] is None
    for index in (0, 2, 3):
        there, was = back[index], tensors[index]
        assert there is not None
        assert was is not None
        assert torch.equal(there.contiguous().view(torch.uint8), was.contiguous().view(torch.uint8))


@given(
    kind=st.sampled_from([MessageKind.PUSH, MessageKind.PARAMETERS]),
    shard=st.integers(0, 4095),
    version=st.integers(0, 65535),
    rounds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_tag_says_kind_shard_and_version_and_fits_a_c_int(
    kind: MessageKind, shard: int, version: int, rounds: tuple[int, int]
) -> None:
    """Beyond 4096 shards and 65536 versions it begins anew, and never reaches into another part of the tag."""
    tag = payload_tag(kind, shard + 4096 * rounds[0], version + 65536 * rounds[1])
    assert (tag >> 28, tag >> 16 & 4095, tag & 65535) == (kind, shard, version)
    assert REQUEST_TAG < tag < 1 << 31


def test_a_twin_has_the_users_class_state_and_present_hyper_parameters() -> None:
    parameter, other = one(), one()
    optimizer = Scaled(2.0, params=[parameter, other])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hooks are for the user's steps"))
    optimizer.state[parameter]["count"] = 5
    shard = Shard([("w", parameter)], [optimizer])
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # wraps the user's step
    optimizer.param_groups[0]["lr"] = 0.25
    shard.note()
    shard.update([torch.tensor([1.0])])
    assert shard.masters[0].item() == 0.5
    assert shard.optimizer_copies[0].state_of(shard.masters[0]) == {"count": 6}
    assert (parameter.item(), optimizer.state[parameter]["count"]) == (1.0, 5)


def test_after_a_restart_it_goes_on_from_the_parameters_and_the_optimizers_state() -> None:
    parameter = one()
    optimizer = Scaled(2.0, params=[parameter])
    shard = Shard([("w", parameter)], [optimizer])
    shard.update([torch.tensor([1.0])])
    with torch.no_grad():
        parameter.fill_(5.0)
    optimizer.state[parameter]["count"] = 7
    shard.restart([parameter], [optimizer])
    shard.update([torch.tensor([1.0])])
    assert shard.masters[0].item() == 3.0
    assert shard.optimizer_copies[0].state_of(shard.masters[0]) == {"count": 8}
    assert shard.version == 2


def test_the_learning_rate_is_scaled_for_one_update_only() -> None:
    parameter = one()
    shard = Shard([("w", parameter)], [torch.optim.SGD([parameter], lr=1.0)])
    shard.update([torch.tensor([1.0])], lr_scale=0.25)
    assert shard.masters[0].item() == 0.75
    shard.update([torch.tensor([1.0])])
    assert shard.masters[0].item() == -0.25


def test_a_parameter_without_a_gradient_or_an_optimizer_stays() -> None:
    used, unused, free = one(), one(), one()
    optimizer = torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.5)
    shard = Shard([("used", used), ("unused", unused), ("free", free)], [optimizer])
    shard.update([torch.tensor([1.0]), None, torch.tensor([1.0])])
    assert [master.item() for master in shard.masters] == [-0.5, 1.0, 1.0]


def test_a_shard_without_parameters_counts_updates() -> None:
    shard = Shard([], [torch.optim.AdamW([one()])])
    shard.update([])
    assert (shard.version, shard.packed().numel(), set(shard.state(1))) == (1, 0, {"version", "clock"})


def owner_of(settings: AsyncSGD, workers: int = 2, start: float = 1.0) -> tuple[Owner, dict[int, list[float]]]:
    parameter = one(start)
    reads: dict[int, list[float]] = {worker: [] for worker in range(workers)}

    def answer(worker: int, reply: OwnerAnswer) -> None:
        value = unpack(reply.payload, [parameter])[0]
        assert value is not None
        reads[worker].append(value.item())

    return Owner(Shard([("w", parameter)], [torch.optim.SGD([parameter], lr=1.0)]), workers, settings, answer), reads


def gradient(value: float) -> torch.Tensor:
    return pack([torch.tensor([value])])


def test_compensation_is_that_of_dc_asgd() -> None:
    owner, reads = owner_of(AsyncSGD(None, compensate=0.5))
    owner.push(0, 1, 0, gradient(4.0))  # nothing happened since it read: 1 − 4/2
    owner.push(1, 1, 0, gradient(2.0))  # read 1, now −1: g = 2 + 0.5·2·2·(−1 − 1) = −2, and −1 + 2/2
    owner.pull(0, 1)
    assert reads[0] == [0.0]
    assert owner.stats()["staleness_max"] == 1


def test_scale_divides_the_rate_by_the_staleness() -> None:
    owner, reads = owner_of(AsyncSGD(None, scale="1/staleness"))
    for clock in (1, 2):
        owner.push(0, clock, clock - 1, gradient(1.0))  # each moves by 1/2
    owner.push(1, 1, 0, gradient(1.0))  # two versions late: by 1/4
    owner.pull(1, 1)
    assert reads[1] == [-0.25]


def test_a_mean_is_of_those_who_came() -> None:
    owner, reads = owner_of(AsyncSGD(0), workers=3)
    owner.push(0, 1, 0, gradient(3.0))
    owner.push(2, 1, 0, gradient(1.0))
    owner.pull(0, 1)
    assert reads[0] == []
    assert owner.stragglers() == [1]
    owner.leave(1)
    assert reads[0] == [-1.0]


@pytest.mark.parametrize("s", [0, 1, None])
def test_nan_reaches_the_parameters(s: int | None) -> None:
    owner, reads = owner_of(AsyncSGD(s, compensate=None if s == 0 else 0.1), workers=1)
    owner.push(0, 1, 0, gradient(float("nan")))
    owner.pull(0, 1)
    assert str(reads[0]) == "[nan]"


def test_what_another_shard_saved_is_refused() -> None:
    parameter = one()
    shard = Shard([("w", parameter)], [torch.optim.SGD([parameter], lr=1.0)])
    with pytest.raises(GradSyncError, match="differ in 'w'"):
        shard.load(Shard([], []).state(0))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop])
def test_a_shard_goes_on_from_what_it_saved(kind: type[torch.optim.Optimizer]) -> None:
    shards = []
    for _ in range(2):
        named = [("a", one(1.0)), ("a.b", one(2.0))]
        shards.append(Shard(named, [kind([p for _, p in named], lr=0.1)]))  # type: ignore[call-arg]
    first, second = shards
    gradients = [torch.tensor([0.3]), torch.tensor([-0.7])]
    for _ in range(2):
        first.update(gradients)
    assert second.load(first.state(clock=2)) == 2
    for shard in shards:
        shard.update(gradients)
    assert second.version == 3
    assert [m.item() for m in first.masters] == [m.item() for m in second.masters]


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_a_histogram_counts_every_number_in_its_class(numbers: list[int]) -> None:
    seen = Histogram()
    for number in numbers:
        seen.add(number)
    for name, count in seen.counts().items():
        low, *rest = map(int, name.split("_"))
        assert count == sum(low <= number <= (rest or [low])[0] for number in numbers)
    assert (seen.mean, seen.highest) == (sum(numbers) / len(numbers), max(numbers))


class Wire:
    """A channel to a peer that has said goodbye, and over which ours has not left yet."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Wire:
        return self

    def wait(self) -> None:
        self.left.wait()

    def recv_any(self, request: torch.Tensor, tag: int) -> Received:
        request.copy_(write(ShardMessage(MessageKind.BYE)))
        return Received()


class Received:
    def wait(self) -> None: ...

    def _source_rank(self) -> int:
        return 1


def test_the_threads_end_when_the_farewell_has_left() -> None:
    wire: Any = Wire()
    mail = Mail(wire, rank=0, size=2, period_s=60, sockets=set())
    mail.start(lambda source, message, payload: None)
    mail.say_goodbye()
    assert not mail.all_gone(0.2)
    wire.left.set()
    assert mail.all_gone(60)
    assert mail.failure is None
