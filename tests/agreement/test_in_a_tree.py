"""What ranks agree on through a tree of subgroups is what they agree on in one: same weights, same sentences."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.agreement.calls import Call, meet
from in_a_tree import in_a_tree

TREES = ["aab", "aabb", "abcd", "abbc"]
PLANS = {
    "every step": gs.Plan(),
    "accumulate": gs.Plan(pace=gs.accumulate(2)),
    "delayed": gs.Plan(pace=gs.delayed(1)),
    "local_sgd": gs.Plan(pace=gs.local_sgd(2)),
    "int8": gs.Plan(compress=gs.int8()),
}


class Net(torch.nn.Module):
    """Some of its parameters are used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.odd, self.even = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        trunk = self.trunk(x)
        result: torch.Tensor = self.odd(trunk) if odd else self.even(trunk)
        return result


def attached(plan: gs.Plan | None = None, **options: Any) -> tuple[Net, torch.optim.Optimizer, gs.GradSync]:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gs.attach(model, optimizer, plan, **options)


def train(plan: str, weighted: bool) -> dict[str, torch.Tensor]:
    """Weights after six steps in which ranks use different parameters, and weigh differently."""
    model, optimizer, sync = attached(PLANS[plan])
    rank = dist.get_rank()
    data = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(rank))
    for step, x in enumerate(data):
        if weighted:
            sync.set_batch_weight(float(1 + (rank + step) % 3))
        model(x, odd=bool((rank + step) % 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("hosts", TREES)
@pytest.mark.parametrize("plan", PLANS)
def test_replicas_are_equal_and_those_of_one_subgroup(run: Any, hosts: str, plan: str) -> None:
    weighted = plan in ("every step", "accumulate", "int8")
    ranks = len(hosts)
    trained = run(in_a_tree, train, hosts, plan, weighted, ranks=ranks)
    usual = run(train, plan, weighted, ranks=ranks)[0]
    for weights in trained:
        for name, tensor in weights.items():
            assert torch.equal(tensor, trained[0][name]), name
            # Within a host and across it int8 rounds other sums.
            torch.testing.assert_close(tensor, usual[name], rtol=1e-5, atol=1e-3 if plan == "int8" else 1e-6)


def join() -> list[float]:
    """Rank 0 has five batches, the others fewer."""
    model, optimizer, sync = attached()
    with sync.join():
        for _ in range(5 - dist.get_rank()):
            model(torch.ones(2, 4) * (1 + dist.get_rank()), odd=True).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    sync.detach()
    return [float(p.detach().sum()) for p in model.parameters()]


@pytest.mark.parametrize("hosts", TREES)
def test_ranks_may_run_out_of_data(run: Any, hosts: str) -> None:
    trained = run(in_a_tree, join, hosts, ranks=len(hosts))
    assert trained == [trained[0]] * len(hosts)
    assert trained[0] == pytest.approx(run(join, ranks=len(hosts))[0], rel=1e-5)


def drop() -> list[str]:
    """A NaN on rank 1, then a backward that raises on the last rank."""
    model, optimizer, sync = attached(guard=gs.Guard(nonfinite="skip"))
    said = []
    for step in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = torch.ones(2, 4) * (float("nan") if step == 1 and dist.get_rank() == 1 else dist.get_rank())
            output = model(x, odd=True)
            if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
                output.register_hook(fail)
            with contextlib.suppress(ArithmeticError):
                output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        said += [str(each.message).split("] ", 1)[-1] for each in caught if "skipped" in str(each.message)]
    sync.detach()
    return [*said, str([float(p.detach().sum()) for p in model.parameters()])]


def fail(_: torch.Tensor) -> None:
    raise ArithmeticError("injected")


@pytest.mark.parametrize("hosts", TREES)
def test_what_is_wrong_is_named_by_rank(run: Any, hosts: str) -> None:
    heard = run(in_a_tree, drop, hosts, ranks=len(hosts))
    last = len(hosts) - 1
    for said in heard[:-1]:
        assert said == heard[0]
        assert said[0].startswith("rank 1 has NaN or Inf in the gradient of ")
        assert said[1].startswith(f"backward did not finish on rank {last}")
    assert heard[-1][-1] == heard[0][-1]


def part() -> str:
    """Rank 1 runs a backward more."""
    model, _, sync = attached()
    for step in range(2):
        if dist.get_rank() == 1:
            with sync.no_sync():
                model(torch.ones(2, 4), odd=True).sum().backward()
        loss = model(torch.ones(2, 4), odd=True).sum()
        try:
            loss.backward()
        except gs.Disagreement as said:
            return f"{step}: {said}"
    return "nothing"


@pytest.mark.parametrize("hosts", TREES)
def test_ranks_out_of_step_hear_the_same_sentence(run: Any, hosts: str) -> None:
    said = run(in_a_tree, part, hosts, ranks=len(hosts))
    assert said == run(part, ranks=len(hosts))
    assert said[0].startswith("0: rank 1 ran 2 backward calls since the last synchronization but rank 0 ran 1")


def disagree() -> str:
    torch.manual_seed(0)
    width = 5 if dist.get_rank() == 2 else 4
    with pytest.raises(gs.Disagreement) as said:
        gs.attach(torch.nn.Linear(width, 4))
    return str(said.value)


@pytest.mark.parametrize("hosts", TREES)
def test_what_differs_at_attach_is_named(run: Any, hosts: str) -> None:
    [said] = {*run(in_a_tree, disagree, hosts, ranks=len(hosts))}
    assert 'parameter 0 ("weight") has shape [4, 5] on rank 2 but [4, 4] on rank' in said or "on rank 2" in said


def words() -> list[int]:
    _, _, sync = attached()
    each_own = [head.digest[0] for head in meet(sync._lane, Call.GATHER, 6, bytes([dist.get_rank()] * 8))]
    alike = [head.digest[0] for head in meet(sync._lane, Call.GATHER, 6, bytes([7] * 8))]
    rows = [row[0] for row in sync._lane.exchange(bytes([10 + dist.get_rank()]))]
    same = [sync._lane.same(b"ab"), sync._lane.same(bytes([dist.get_rank(), 0]))]
    sync.detach()
    return [*each_own, *alike, *rows, *same]


@pytest.mark.parametrize("hosts", TREES)
def test_every_rank_hears_what_each_brought(run: Any, hosts: str) -> None:
    ranks = range(len(hosts))
    told = [*ranks, *[7] * len(hosts), *[10 + rank for rank in ranks], True, False]
    assert run(in_a_tree, words, hosts, ranks=len(hosts)) == [told] * len(hosts)


def save_alone() -> list[str]:
    """A NaN of rank 1 under delayed(1), and rank 0 alone looks at its state, which waits for the average under way."""
    model, optimizer, sync = attached(gs.Plan(pace=gs.delayed(1)), guard=gs.Guard(nonfinite="skip"))
    said = []
    for step in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = torch.ones(2, 4) * (float("nan") if step == 2 and dist.get_rank() == 1 else dist.get_rank())
            model(x, odd=True).square().mean().backward()
            if dist.get_rank() == 0:
                sync.state_dict()
            optimizer.step()
            optimizer.zero_grad()
        said += [str(each.message).split("] ", 1)[-1] for each in caught if "skipped" in str(each.message)]
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    return [*said, str([float(p.detach().sum()) for p in model.parameters()])]


@pytest.mark.parametrize("hosts", ["aaaa", *TREES])
def test_a_rank_may_look_at_what_came_before_others_do(run: Any, hosts: str) -> None:
    """What is fetched has its place where the header was launched: who waits early met the next header of others."""
    heard = run(in_a_tree, save_alone, hosts, ranks=len(hosts))
    assert heard == [heard[0]] * len(hosts)
    assert heard[0][0].startswith("rank 1 has NaN or Inf")
    assert len(heard[0]) == 2


def run_out(first: int) -> str:
    """Under delayed(1) one rank has fewer batches than the others, and leaves."""
    model, optimizer, sync = attached(gs.Plan(pace=gs.delayed(1)))
    try:
        for _ in range(3 if dist.get_rank() == first else 6):
            model(torch.ones(2, 4), odd=True).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.detach()
    except gs.GradSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "left"


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd"])
def test_who_has_fewer_batches_is_told_apart_from_a_death(run: Any, hosts: str, first: int) -> None:
    heard = run(in_a_tree, run_out, hosts, first, ranks=4)
    assert len(set(heard)) == 1
    assert heard[0].startswith("Disagreement: rank 0 is in ")
    assert "every rank must take equally many steps" in heard[0]


def idle() -> float:
    """How much of a processor this rank uses in a quiet moment after it gave up."""
    for _ in range(2):
        part()
    begun, before = time.perf_counter(), time.process_time()
    time.sleep(1)
    return (time.process_time() - before) / (time.perf_counter() - begun)


@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_ranks_that_gave_up_leave_the_processor_alone(run: Any, hosts: str) -> None:
    """Gloo's threads spun on messages for which they found no buffer any more: one and a half processors."""
    assert max(run(in_a_tree, idle, hosts, ranks=4)) < 0.25
