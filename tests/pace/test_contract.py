"""What holds for every pace, with a few compressors, on one rank, two and three."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.plan.paces import AsyncSGD, Pace

PACES: dict[str, Pace] = {
    "every_step": gs.every_step(),
    "accumulate": gs.accumulate(2),
    "local_sgd": gs.local_sgd(3, warmup=2),
    "local_sgd with state": gs.local_sgd(2, optimizer_state=True),
    "diloco": gs.diloco(3, gs.nesterov(0.75, 0.5)),
    "diloco streaming": gs.diloco(4, gs.nesterov(0.75, 0.5), fragments=2, delay=1, mixing=0.5),
    "delayed": gs.delayed(1),
    "delayed by two": gs.delayed(2),
    "async_sgd in step": gs.async_sgd(0),
    "async_sgd": gs.async_sgd(2),
    "gossip": gs.gossip("ring"),
    "gossip exponential": gs.gossip("exponential", every=2),
}
ONLY_EXACT = {name for name in PACES if name.startswith(("async", "gossip"))}
NAMES_ITS_OWN = {name for name in PACES if not name.startswith(("every", "accumulate", "async"))}
NOT_REPEATABLE = {"async_sgd"}  # by design: updates are applied as they come
COMPRESSORS = {"exact": None, "int8": gs.int8(), "powersgd": gs.powersgd(2)}
CASES = [
    pytest.param(pace, compress, ranks, id=f"{pace}, {compress}, {ranks}")
    for pace in PACES
    for compress in COMPRESSORS
    for ranks in (1, 2, 3)
    if compress == "exact" or (pace not in ONLY_EXACT and ranks == (3 if compress == "int8" else 2))
]


class Training:
    """A model that learns to copy another, on this rank's own data."""

    def __init__(self, pace: str, compress: str) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        plan = gs.Plan(pace=PACES[pace], compress=COMPRESSORS[compress])
        self.sync = gs.attach(self.model, self.optimizer, plan)
        self.truth = torch.randn(6, 3)

    def loss(self, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        return (self.model(x) - x @ self.truth).square().mean()

    def step(self, step: int) -> float:
        loss = self.loss(step, dist.get_rank())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def drain(self) -> None:
        while self.sync.drain():
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def state(self) -> bytes:
        """What a rank saves; `async_sgd` must be drained before."""
        if isinstance(self.sync.plan.pace, AsyncSGD):
            self.drain()
        file = io.BytesIO()
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.sync.state_dict())
        torch.save(parts, file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        model, optimizer, sync = torch.load(io.BytesIO(state), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.sync.load_state_dict(sync)


def learn(pace: str, compress: str) -> dict[str, Any]:
    training = Training(pace, compress)
    losses = [training.step(step) for step in range(60)]
    training.drain()
    weights, equal = training.weights(), training.sync.replicas_equal
    stats = training.sync.stats()
    training.sync.detach()
    again = copy.deepcopy(training.model)
    again(torch.randn(2, 6)).sum().backward()  # nothing of us is left on it
    return {"losses": losses, "weights": weights, "equal": equal, "stats": stats}


@pytest.mark.parametrize(("pace", "compress", "ranks"), CASES)
def test_every_pace_learns_and_ends_with_equal_replicas(
    pace: str, compress: str, ranks: int, run: Callable[..., Any]
) -> None:
    results = run(learn, pace, compress, ranks=ranks)
    for result in results:
        assert torch.equal(result["weights"], results[0]["weights"])
        assert result["equal"]
        assert sum(result["losses"][-10:]) < 0.5 * sum(result["losses"][:10])
        assert all(isinstance(value, float | int | str | None) for value in result["stats"].values())


SPLITS = (1, 4)


def continue_from(pace: str, compress: str) -> None:
    whole, states = Training(pace, compress), {}
    for step in range(11):
        if step in SPLITS:
            states[step] = whole.state()
        whole.step(step)
    expected = whole.weights()
    whole.sync.detach()
    for split, state in states.items():
        resumed = Training(pace, compress)
        resumed.load(state)
        for step in range(split, 11):
            if step in SPLITS and step > split:
                resumed.state()  # as the whole run did: to save, `async_sgd` is drained
            resumed.step(step)
        assert torch.equal(resumed.weights(), expected), f"saved after {split} steps"
        resumed.sync.detach()


@pytest.mark.parametrize("compress", ["exact", "powersgd"])
@pytest.mark.parametrize("pace", [pace for pace in PACES if pace not in NOT_REPEATABLE])
def test_continuing_from_a_state_is_the_uninterrupted_run(pace: str, compress: str, run: Callable[..., Any]) -> None:
    if compress != "exact" and pace in ONLY_EXACT:
        pytest.skip("this pace compresses nothing")
    run(continue_from, pace, compress)


def save_alone() -> None:
    for pace in PACES:
        whole = Training(pace, "exact")
        for step in range(4):
            whole.step(step)
            assert whole.sync.replicas_equal, pace
        state = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict(), whole.sync.state_dict()))
        resumed = Training(pace, "exact")
        for part, saved in zip((resumed.model, resumed.optimizer, resumed.sync), state, strict=True):
            part.load_state_dict(saved)
        for training in (whole, resumed):
            for step in range(4, 8):
                training.step(step)
            training.drain()
        assert torch.equal(resumed.weights(), whole.weights()), pace
        whole.sync.detach()
        resumed.sync.detach()


def test_one_rank_is_one_replica_and_may_save_in_the_middle_of_any_pace(run: Callable[..., Any]) -> None:
    run(save_alone, ranks=1)


def keep_frozen(pace: str) -> None:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=PACES[pace]))
    for _ in range(5):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
    sync.detach()


@pytest.mark.parametrize("pace", PACES)
def test_a_frozen_parameter_stays_as_it_is(pace: str, run: Callable[..., Any]) -> None:
    run(keep_frozen, pace)


def detach_early(pace: str) -> None:
    training = Training(pace, "exact")
    for step in range(2):
        training.step(step)
    training.sync.detach()
    training.loss(2, 0).backward()  # as if we had never been there
    assert all(parameter.grad is not None for parameter in training.model.parameters())
    training.optimizer.step()


@pytest.mark.parametrize("pace", PACES)
def test_detaching_in_the_middle_leaves_a_plain_model(pace: str, run: Callable[..., Any]) -> None:
    run(detach_early, pace)


@pytest.mark.parametrize("pace", ["local_sgd", "diloco", "async_sgd", "gossip"])
def test_paces_of_parameters_want_the_optimizer(pace: str, run: Callable[..., Any]) -> None:
    run(attach_without, pace)


def attach_without(pace: str) -> None:
    with pytest.raises(ValueError, match="pass the optimizer"):
        gs.attach(torch.nn.Linear(2, 2), None, gs.Plan(pace=PACES[pace]))


def name_buckets(pace: str) -> None:
    training = Training(pace, "exact")
    names = [training.sync._steps.pace.describe(number) for number in range(8)]
    assert all(names)
    assert len(set(names)) == len(names), "no two have one name"
    if pace in NAMES_ITS_OWN:
        assert "(0.weight" in names[0], "its first parameters are named"
    training.sync.detach()


@pytest.mark.parametrize("pace", PACES)
def test_every_bucket_has_a_name_of_its_own_and_those_of_a_pace_tell_what_is_in_them(
    pace: str, run: Callable[..., Any]
) -> None:
    run(name_buckets, pace)
