"""Steps that go wrong or sideways: exceptions, losses that touch nothing, scalers, several models at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from models import Branches, Convolution, Trapped, mlp
from yardstick import assert_replicas_equal


def skip_batches(raising: list[int]) -> list[str]:
    """Train; in steps 0 and 2 backward raises on the ranks named, is caught, and the batch is skipped."""
    torch.manual_seed(0)
    model = Trapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1024))
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            model.armed = step in (0, 2) and rank in raising
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            try:
                model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            except ArithmeticError:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
            unchanged = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            assert unchanged == (step in (0, 2)), f"step {step}"
    assert_replicas_equal(model)
    sync.detach()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("ranks", "raising"), [(2, [0, 1]), (2, [1]), (3, [0]), (3, [0, 1, 2])])
def test_a_batch_whose_backward_raised_is_skipped_on_every_rank(
    ranks: int, raising: list[int], run: Callable[..., Any]
) -> None:
    for messages in run(skip_batches, raising, ranks=ranks):
        skipped = [message for message in messages if "skipped on every rank" in message]
        assert len(skipped) == 2
        assert all(f"rank {raising[0]}" in message or "ranks 0" in message for message in skipped)


def raise_inside_a_window(raising: list[int]) -> list[bool]:
    """Windows of three; in the second one, backward of its first micro-batch raises on some ranks."""
    torch.manual_seed(0)
    model = Trapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(3), bucket_bytes=1024))
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    applied = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(9):
            model.armed = step == 3 and rank in raising
            before = model.first.weight.detach().clone()
            try:
                model(torch.randn(4, 8, generator=generator)).square().mean().backward()
                optimizer.step()
            except ArithmeticError:
                pass
            optimizer.zero_grad()
            applied.append(not torch.equal(before, model.first.weight))
    assert_replicas_equal(model)
    assert sync.stats()["steps"] == 3
    sync.detach()
    return applied


@pytest.mark.parametrize("raising", [[1], [0, 1]])
def test_a_window_in_which_a_backward_raised_is_dropped_on_every_rank(
    raising: list[int], run: Callable[..., Any]
) -> None:
    expected = [False, False, True] + [False] * 3 + [False, False, True]
    assert run(raise_inside_a_window, raising) == [expected] * 2


def touch_nothing(ranks_without: list[int], plan: gs.Plan) -> None:
    """On some ranks the loss of some steps touches no parameter."""
    torch.manual_seed(0)
    model, reference = mlp(), mlp()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, plan)
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x = torch.randn(4, 8, generator=generator)
        absent = rank in ranks_without and step % 2 == 1
        loss = x.requires_grad_().sum() if absent else model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_replicas_equal(model)
    sync.detach()
    assert size == 1 or not torch.equal(model[0].weight, reference[0].weight)


@pytest.mark.parametrize("plan", [gs.Plan(bucket_bytes=1024), gs.Plan(pace=gs.accumulate(2), bucket_bytes=1024)])
def test_a_rank_whose_loss_touches_no_parameter_still_takes_part(plan: gs.Plan, run: Callable[..., Any]) -> None:
    run(touch_nothing, [1], plan)
    run(touch_nothing, [0, 1], plan)


def value_of_touching_nothing() -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    sync = gs.attach(model, optimizer)
    x = torch.full((1, 1), 6.0, requires_grad=True)
    (model(x).sum() if dist.get_rank() == 0 else x.sum()).backward()
    optimizer.step()
    sync.detach()
    return model.weight.flatten().tolist()


def test_a_rank_that_touched_nothing_counts_as_zero_in_the_mean(run: Callable[..., Any]) -> None:
    assert run(value_of_touching_nothing, ranks=3) == [[-2.0]] * 3


def scaled(kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    sync = gs.attach(model, optimizer) if kind == "gradsync" else None
    forward = model if sync is not None else DistributedDataParallel(model)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(torch.randn(4, 8, generator=generator)).float().square().mean()
        if step == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_replicas_equal(model)
    if sync is not None:
        sync.detach()
    return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]


def check_scaler() -> None:
    for ours, theirs in zip(scaled("gradsync"), scaled("ddp"), strict=True):
        assert torch.equal(ours, theirs)


def test_a_grad_scaler_skips_alike_and_equals_ddp(run: Callable[..., Any]) -> None:
    run(check_scaler)


def scaled_in_windows() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(2)))
    before = model[0].weight.detach().clone()
    for step in range(4):
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        assert sync.mid_window == (step % 2 == 0)
        if not sync.mid_window:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert not torch.equal(before, model[0].weight)
    assert_replicas_equal(model)
    sync.detach()


def test_a_grad_scaler_works_with_windows_when_asked_first(run: Callable[..., Any]) -> None:
    run(scaled_in_windows)


def evaluate_on_one_rank() -> None:
    torch.manual_seed(dist.get_rank())
    model = Convolution()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    for _ in range(3):
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        assert_replicas_equal(dict(model.named_buffers()))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model(torch.randn(2, 3, 8, 8))
            model(torch.randn(2, 3, 8, 8))  # with gradients too, as long as none is taken
            model.train()
    assert model.norm.num_batches_tracked.item() == 3
    sync.detach()


def test_buffers_travel_with_the_step_and_evaluation_on_one_rank_never_hangs(run: Callable[..., Any]) -> None:
    run(evaluate_on_one_rank, ranks=3)


def keep_buffers() -> float:
    model = nn.BatchNorm1d(2)
    sync = gs.attach(model, buffers="none")
    model(torch.randn(8, 2) + dist.get_rank()).square().sum().backward()
    sync.detach()
    return model.running_mean.sum().item()


def test_buffers_can_stay_local(run: Callable[..., Any]) -> None:
    first, second = run(keep_buffers)
    assert first != second


def generator_and_discriminator() -> None:
    """Two GradSyncs that share a backward, beside a teacher's, with the user's own collectives in between."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    syncs = [gs.attach(net, opt, gs.Plan(bucket_bytes=1024)) for net, opt in zip(nets, optimizers, strict=True)]
    rank = dist.get_rank()
    seen: list[float] = []

    def user_collective(grad: torch.Tensor) -> None:
        """On the default group, in the middle of our backward, of the size of a bucket."""
        word = torch.full((256,), float(rank))
        dist.all_reduce(word)
        seen.append(word[0].item())

    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        hidden = nets[0](torch.randn(4, 8, generator=generator))
        hidden.register_hook(user_collective)
        if step % 2 and rank:
            # The other one's output first: callbacks are queued in another order on this rank
            loss = nets[1](hidden).square().mean() + hidden.mean()
        else:
            loss = hidden.mean() + nets[1](hidden).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for net in nets:
        assert_replicas_equal(net)
    size = dist.get_world_size()
    assert seen == [size * (size - 1) / 2] * 4
    for sync in syncs:
        sync.detach()


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_models_share_a_backward_while_the_user_reduces_too(ranks: int, run: Callable[..., Any]) -> None:
    run(generator_and_discriminator, ranks=ranks)


def averaged_subgroup() -> list[float]:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = nn.Linear(1, 1, bias=False)
    sync = gs.attach(model, group=halves[rank % 2])
    model(torch.full((1, 1), float(rank))).sum().backward()
    value = model.weight.grad.flatten().tolist()
    sync.detach()
    return value


def test_a_group_averages_among_its_members_only(run: Callable[..., Any]) -> None:
    assert run(averaged_subgroup, ranks=4) == [[1.0], [2.0], [1.0], [2.0]]


def take_grad_penalty() -> None:
    """torch.autograd.grad in the step, twice, must not count as a synchronization."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(2)))
    for _ in range(4):
        x = torch.randn(4, 8, requires_grad=True)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sync.stats()["steps"] == 2
    assert_replicas_equal(model)
    sync.detach()


def test_autograd_grad_is_not_a_backward_that_synchronizes(run: Callable[..., Any]) -> None:
    run(take_grad_penalty)


def replace_parameter() -> str:
    model = mlp()
    sync = gs.attach(model)
    model[2].weight = nn.Parameter(torch.zeros_like(model[2].weight))
    with pytest.raises(gs.GradSyncError) as caught:
        model(torch.randn(2, 8))
    sync.detach()
    return str(caught.value)


def test_a_replaced_parameter_is_noticed_by_name(run: Callable[..., Any]) -> None:
    for message in run(replace_parameter):
        assert "2.weight was replaced" in message


def step_under_no_sync() -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    with sync.no_sync():
        model(torch.randn(2, 8)).sum().backward()
    with pytest.raises(gs.GradSyncError) as caught:
        optimizer.step()
    sync.drain()
    optimizer.step()
    assert_replicas_equal(model)
    sync.detach()
    return str(caught.value)


def test_a_step_with_local_gradients_is_an_error(run: Callable[..., Any]) -> None:
    for message in run(step_under_no_sync):
        assert "no_sync()" in message


def poison(policy: str, first: bool) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1024), guard=gs.Guard(nonfinite=policy))
    said = ""
    for step in range(3):
        x = torch.randn(4, 8)
        if dist.get_rank() == 1 and step == (0 if first else 1):
            model[2].weight.register_hook(lambda grad: grad * float("nan"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model(x).square().mean().backward()
            except gs.NonFinite as error:
                assert all(p.grad is None for p in model.parameters())
                said = str(error)
                break
        if any("skipped" in str(each.message) for each in caught):
            assert all(p.grad is None for p in model.parameters())
            said = str(caught[-1].message)
            break
        optimizer.step()
        optimizer.zero_grad()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    assert_replicas_equal(model)
    sync.detach()
    return said, finite


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("first", [True, False])
def test_a_nan_is_named_and_no_rank_applies_it(policy: str, first: bool, run: Callable[..., Any]) -> None:
    for said, finite in run(poison, policy, first):
        assert "rank 1 has NaN or Inf in the gradient of 2.weight" in said
        assert finite


def see_same_data(same: bool) -> list[str]:
    model = mlp()
    sync = gs.attach(model)
    generator = torch.Generator().manual_seed(0 if same else dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(4, 8, generator=generator)).sum().square().backward()
    sync.detach()
    return [str(each.message) for each in caught]


def test_equal_first_gradients_are_a_warning(run: Callable[..., Any]) -> None:
    first, second = run(see_same_data, True)
    assert any("DistributedSampler" in message for message in first)
    assert not second, "one warning is enough"
    assert run(see_same_data, False) == [[], []]


def use_dict_outputs() -> None:
    class Structured(Branches):
        def forward(self, x: torch.Tensor, branch: int) -> dict[str, Any]:  # type: ignore[override]
            return {"logits": [super().forward(x, branch)], "note": "text"}

    torch.manual_seed(0)
    model = Structured()
    sync = gs.attach(model)
    for step in range(3):
        model(torch.randn(4, 8), step)["logits"][0].sum().backward()
    assert sync.stats()["steps"] == 3
    sync.detach()


def test_models_may_return_nested_outputs(run: Callable[..., Any]) -> None:
    run(use_dict_outputs)


def call_differently(mine: str) -> str:
    """Rank 1 does something else than rank 0, which is in backward."""
    model = mlp()
    sync = gs.attach(model, guard=gs.Guard(timeout=20))
    for _ in range(2):
        model(torch.randn(2, 8) + dist.get_rank()).sum().backward()
    try:
        if dist.get_rank() == 0:
            model(torch.randn(2, 8)).sum().backward()
        elif mine == "detach":
            sync.detach()
        elif mine == "broadcast":
            sync.broadcast()
        elif mine == "load_state_dict":
            sync.load_state_dict(sync.state_dict())
        elif mine == "state_dict(all_ranks=True)":
            sync.state_dict(all_ranks=True)
        else:
            with sync.join():
                model(torch.randn(2, 8)).sum().backward()
    except gs.Disagreement as error:
        assert all(p.grad is None for p in model.parameters())
        return str(error)
    finally:
        sync.detach()
    return ""


@pytest.mark.parametrize("mine", ["detach", "broadcast", "load_state_dict", "state_dict(all_ranks=True)", "join"])
def test_ranks_in_different_calls_are_told_instead_of_aborted(mine: str, run: Callable[..., Any]) -> None:
    first, second = run(call_differently, mine)
    assert "rank 0 is in a synchronization but rank 1 is in" in first
    assert mine in first
    assert second in (first, "") if mine == "detach" else second == first
