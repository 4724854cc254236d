"""Under stock DDP: exact averages are DDP's own, compressed ones are those of `attach`, and replicas never part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import (
    COMPRESSORS,
    STEPS,
    Branches,
    Convolution,
    assert_close,
    assert_equal,
    assert_replicas_equal,
    batches,
    loss_of,
    mlp,
    train,
    train_attached,
    wrap,
)
from torch import nn
from torch.distributed.algorithms.join import Join

import gradsync as gs

Run = Callable[..., list[Any]]

ALGORITHMS = {
    "native": gs.native(),
    "ring": gs.ring(),
    "tree": gs.tree(),
    "halving_doubling": gs.halving_doubling(),
    "hierarchical": gs.hierarchical(),
    "shared_memory": gs.shared_memory(),
}
OPTIONS = {
    "as it is": {},
    "one bucket": {"bucket_cap_mb": 25},
    "a bucket for each": {"bucket_cap_mb": 1e-6},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph and views": {"static_graph": True, "gradient_as_bucket_view": True},
}
EVERY_OPTION = pytest.mark.parametrize("option", OPTIONS)


def exact_is_ddp(plan: gs.Plan, options: dict[str, Any]) -> None:
    ours, theirs = train(plan, **options)[0], train(None, **options)[0]
    (assert_equal if dist.get_world_size() == 2 else assert_close)(ours, theirs)
    assert_replicas_equal(ours)


@EVERY_OPTION
def test_exact_averages_are_ddps_own_to_the_bit(option: str, run: Run) -> None:
    run(exact_is_ddp, gs.Plan(), OPTIONS[option])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_ddps_averages(algorithm: str, ranks: int, run: Run) -> None:
    run(exact_is_ddp, gs.Plan(algorithm=ALGORITHMS[algorithm]), {}, ranks=ranks)


def compressed_as_attached(name: str) -> None:
    # The first synchronization after attach is exact in any case.
    plan = gs.Plan(compress=gs.warmup(COMPRESSORS[name], 1))
    ours, losses = train(plan)
    assert_close(ours, train_attached(plan)[0])
    assert_replicas_equal(ours)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_gives_the_averages_of_attach(name: str, ranks: int, run: Run) -> None:
    run(compressed_as_attached, name, ranks=ranks)


def options_do_not_matter(options: dict[str, Any]) -> None:
    plan = gs.Plan(compress=COMPRESSORS["by_parameter"])
    assert_close(train(plan, **options)[0], train(plan)[0])


@EVERY_OPTION
def test_compression_does_not_depend_on_ddps_options(option: str, run: Run) -> None:
    run(options_do_not_matter, OPTIONS[option])


def compressed_channels_last() -> None:
    for compressor in (gs.int8(), gs.powersgd(2), COMPRESSORS["by_parameter"]):
        plan = gs.Plan(compress=gs.warmup(compressor, 1))
        ours, theirs = (fit(plan, Convolution, (4, 3, 8, 8))[0] for fit in (train, train_attached))
        assert_close(ours, theirs)


def test_a_weight_in_channels_last_is_compressed_as_it_lies(run: Run) -> None:
    run(compressed_channels_last)


def unused_branches() -> None:
    options = {"find_unused_parameters": True}
    assert_equal(train(gs.Plan(), Branches, **options)[0], train(None, Branches, **options)[0])
    for compressor in (gs.int8(), gs.powersgd(1)):
        assert_replicas_equal(train(gs.Plan(compress=compressor), Branches, **options)[0])


def test_unused_parameters_are_left_to_ddp(run: Run) -> None:
    run(unused_branches)


def accumulated(plan: gs.Plan | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = mlp()
    ddp, state = wrap(model, plan)
    batch = batches(16, 9)
    for _ in range(3):
        with ddp.no_sync():
            loss_of(ddp, batch()).backward()
        loss_of(ddp, batch()).backward()
    if state is not None:
        assert state.stats()["steps"] == 3
        state.close()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def no_sync_is_ddps() -> None:
    assert_equal(accumulated(gs.Plan()), accumulated(None))


def test_no_sync_is_ddps_own(run: Run) -> None:
    run(no_sync_is_ddps)


def uneven(plan: gs.Plan | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = mlp()
    ddp, state = wrap(model, plan)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), batches(16, 9)
    with Join([ddp]):
        for _ in range(4 + 3 * dist.get_rank()):
            loss_of(ddp, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    if state is not None:
        state.close()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def joined_as_ddp() -> None:
    assert_equal(uneven(gs.Plan()), uneven(None))
    assert_replicas_equal(uneven(gs.Plan(compress=gs.int8())))


def test_a_rank_without_inputs_shadows_the_others_under_join(run: Run) -> None:
    run(joined_as_ddp)


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_single, self.in_double = nn.Linear(9, 9), nn.Linear(9, 9).double()
        self.in_half = nn.Linear(9, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_half(self.in_double(self.in_single(x).double()).bfloat16()).float()


def mixed_types() -> None:
    assert_equal(train(gs.Plan(), MixedTypes)[0], train(None, MixedTypes)[0])
    assert_replicas_equal(train(gs.Plan(compress=gs.int8()), MixedTypes)[0])


def test_every_dtype_has_buckets_of_its_own(run: Run) -> None:
    run(mixed_types)


def nothing_is_lost(name: str) -> None:
    """Σ gradients == Σ averages + Σ residuals, over ranks and steps."""
    torch.manual_seed(7)
    model, twin, batch = mlp(), mlp(), batches(16, 9)
    twin.load_state_dict(model.state_dict())
    ddp, state = wrap(model, gs.Plan(compress=COMPRESSORS[name]))
    assert state is not None
    size = dist.get_world_size()
    owed = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    for _ in range(STEPS):
        x = batch()
        for forward in (ddp, twin):
            loss_of(forward, x).backward()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            owed[name] += (theirs.grad - ours.grad) / size
            ours.grad = theirs.grad = None
    for name, residual in state.residuals().items():
        missing = owed[name] - residual
        dist.all_reduce(missing)
        torch.testing.assert_close(missing, torch.zeros_like(missing), rtol=0, atol=1e-5)
    state.close()


@pytest.mark.parametrize("name", ["int8", "sign", "topk", "randomk", "powersgd", "by_parameter"])
def test_what_was_not_sent_is_in_the_residuals_though_ddp_moves_its_buckets(name: str, run: Run) -> None:
    run(nothing_is_lost, name, ranks=3)


def nan_is_seen_once(name: str) -> None:
    torch.manual_seed(7)
    model, batch = mlp(), batches(16, 9)
    ddp, state = wrap(model, gs.Plan(compress=COMPRESSORS.get(name)))
    assert state is not None
    for step in range(5):
        x = batch()
        if step == 3 and dist.get_rank() == 1:
            x[0, 0] = torch.nan
        loss_of(ddp, x).backward()
        clean = all(bool(param.grad.isfinite().all()) for param in model.parameters() if param.grad is not None)
        assert clean == (step != 3), f"step {step}"
        model.zero_grad()
    state.close()


@pytest.mark.parametrize("name", ["exact", "int8", "topk", "randomk", "powersgd", "bf16 with feedback"])
def test_a_nan_reaches_every_rank_and_is_gone_in_the_next_step(name: str, run: Run) -> None:
    run(nan_is_seen_once, name)


def what_it_says() -> dict[str, Any]:
    torch.manual_seed(7)
    ddp, state = wrap(mlp(), gs.Plan(compress=gs.int8(), audit_every=2))
    assert state is not None
    batch = batches(16, 9)
    for _ in range(5):
        loss_of(ddp, batch()).backward()
    stats = state.stats()
    state.close()
    state.close()  # twice is once
    return stats


def test_stats_have_the_keys_of_attach(run: Run) -> None:
    stats = run(what_it_says)[0]
    assert stats["steps"] == 5
    assert stats["num_buckets"] >= 2
    assert stats["int8.ratio"] > 3
    assert stats["audit_step"] == 4
    assert 0 < stats["audit_error"] < 0.1


def alone() -> None:
    assert_equal(train(gs.Plan(compress=gs.int8()))[0], train(None)[0])


def test_one_rank_alone_is_plain_training(run: Run) -> None:
    run(alone, ranks=1)
