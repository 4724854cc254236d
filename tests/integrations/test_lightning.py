"""Under Lightning's Trainer: the weights of stock DDP to the bit, whatever the loop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning_training import Pair, Plain, assert_equal, assert_replicas_equal, fit, loader, trainer, weights

import gradsync as gs
from global_state import changes, snapshot
from gradsync.integrations.batch_norm import convert
from gradsync.integrations.lightning import GradSyncStrategy
from gradsync.integrations.lightning_refusals import refuse

Run = Callable[..., list[Any]]

LOOPS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    {"precision": "bf16-mixed", "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    {"max_epochs": 9},  # and an early stop
    {"module": Pair},
]


def early() -> EarlyStopping:
    """Stops after the third epoch."""
    return EarlyStopping("loss", patience=2, min_delta=10.0)


def equals_ddp() -> None:
    for options in LOOPS:
        stock = fit(DDPStrategy(find_unused_parameters=True), callbacks=[early()], **options)
        strategy = GradSyncStrategy()
        ours = fit(strategy, callbacks=[early()], **options)
        assert_equal(dict(ours.named_parameters()), dict(stock.named_parameters()), options)
        if dist.get_rank() == 0:  # elsewhere statistics are rank 0's of some earlier step
            assert_equal(weights(ours), weights(stock), options)
        assert_replicas_equal(ours)
        assert ours.trainer.global_step == stock.trainer.global_step > 0
        assert ours.trainer.current_epoch in (2, 3)
        assert strategy.stats()["gradsync/steps"] > 0


def test_trained_weights_are_those_of_ddp(run: Run) -> None:
    """Automatic and manual, accumulated, clipped, in mixed precision, stopped early; with an unused parameter."""
    run(equals_ddp)


def other_loops() -> None:
    before = fit(GradSyncStrategy(), max_epochs=1)
    # Compression learns; the state stays light, without a wrapper.
    strategy = GradSyncStrategy(gs.Plan(compress=gs.int4()), guard=gs.Guard(drift="raise"))
    model = fit(strategy, max_epochs=4)
    assert_replicas_equal(model)
    assert sum(model.losses[-6:]) < 0.9 * sum(model.losses[:6])
    assert list(model.state_dict()) == list(before.state_dict())
    with pytest.raises(gs.GradSyncError, match="detached"):
        strategy.sync.broadcast()  # type: ignore[union-attr]
    # Validation, testing and prediction attach nothing; one rank may evaluate by itself.
    strategy = GradSyncStrategy()
    trainer(strategy).validate(model, loader(16), verbose=False)
    assert strategy.sync is None
    assert strategy.stats() == {}
    fit(GradSyncStrategy(), RankZeroEvaluates)


class RankZeroEvaluates(Plain):
    """In the middle of training, with gradients off, outside of Lightning's loops."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            self.eval()
            with torch.no_grad():
                self.body(torch.randn(4, 8))
                self(torch.randn(4, 8))
            self.train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_loops_besides_training_are_lightnings_own(run: Run) -> None:
    run(other_loops)


def with_sync_batchnorm() -> None:
    stock = fit(DDPStrategy(find_unused_parameters=True), Converted)
    ours = fit(GradSyncStrategy(), sync_batchnorm=True)
    assert_equal(weights(ours), weights(stock))  # statistics too, and on every rank
    assert type(ours.body[1]) is torch.nn.BatchNorm1d  # it is taken off again
    apart = fit(GradSyncStrategy())
    assert not torch.equal(ours.body[1].running_mean, apart.body[1].running_mean)
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU"):
        fit(DDPStrategy(), sync_batchnorm=True)  # PyTorch's own, on a CPU


class Forgetful(Plain):
    """With dropout, which draws from the global random state in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Dropout(0.5), torch.nn.Linear(33, 4))


def with_dropout() -> None:
    fit(DDPStrategy(find_unused_parameters=True), Forgetful)  # what Lightning itself leaves behind once, it has
    stock = fit(DDPStrategy(find_unused_parameters=True), Forgetful)
    theirs = snapshot()
    for plan in (gs.Plan(), gs.auto(allow="exact", steps=2)):
        ours = fit(GradSyncStrategy(plan), Forgetful)
        assert_equal(weights(ours), weights(stock), plan)
        assert changes(theirs, snapshot()) == []


def test_with_dropout_neither_attach_nor_auto_leaves_a_trace_in_the_process(run: Run) -> None:
    run(with_dropout, timeout=110)


class Converted(Plain):
    """The same layers under Lightning's own strategy."""

    def __init__(self) -> None:
        super().__init__()
        convert(self)


def test_sync_batchnorm_has_the_statistics_of_all_ranks(run: Run) -> None:
    run(with_sync_batchnorm)


PACES = [gs.accumulate(2), gs.delayed(1), gs.local_sgd(3), gs.diloco(3), gs.async_sgd(0), gs.gossip()]


def every_pace() -> None:
    for pace in PACES:
        strategy = GradSyncStrategy(gs.Plan(pace=pace))
        model = fit(strategy, max_epochs=4, gradient_clip_val=1.0)
        assert_replicas_equal(model)
        assert sum(model.losses[-6:]) < 0.95 * sum(model.losses[:6]), pace
        fit(GradSyncStrategy(gs.Plan(pace=gs.local_sgd(2))), accumulate_grad_batches=2)
    accumulated = fit(GradSyncStrategy(gs.Plan(pace=gs.accumulate(2))), NoSchedule)
    assert_equal(weights(accumulated), weights(fit(GradSyncStrategy(), NoSchedule, accumulate_grad_batches=2)))


class NoSchedule(Plain):
    """No BatchNorm statistics that depend on when they travel, and an optimizer without a schedule."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_every_pace_learns_and_leaves_one_model(run: Run) -> None:
    run(every_pace)


def refusals() -> None:
    with pytest.raises(ValueError, match=r"accumulate\(2\) and Trainer\(accumulate_grad_batches=3\) would accumulate"):
        fit(GradSyncStrategy(gs.Plan(pace=gs.accumulate(2))), accumulate_grad_batches=3)
    with pytest.raises(ValueError, match=r"accumulate\(2\) and GradientAccumulationScheduler\(\{4: 2, 0: 1\}\) would"):
        fit(GradSyncStrategy(gs.Plan(pace=gs.accumulate(2))), callbacks=[GradientAccumulationScheduler({4: 2})])
    with pytest.raises(ValueError, match="refuses a step without gradients, which Delayed"):
        refuse(gs.Plan(pace=gs.delayed(1)), None, None, scaled=True)
    with pytest.raises(ZeroDivisionError if dist.get_rank() == 1 else gs.GradSyncError):
        fit(GradSyncStrategy(guard=gs.Guard(timeout=20)), OneRaises)


class OneRaises(Plain):
    """An error of the user's, on one rank."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_rank == 1 and index == 3:
            raise ZeroDivisionError("one rank's own")
        return super().training_step(batch, index)


def test_what_cannot_work_is_refused_or_ends_on_every_rank(run: Run) -> None:
    run(refusals)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"plan": "int8"}, "plan must be a gs.Plan"),
        ({"guard": 5}, "guard must be a gs.Guard, got 5"),
        ({"ignore": "net.bias"}, "a list of names or tensors, got the string 'net.bias'"),
        ({"ignore": torch.ones(3)}, r"a list of names or tensors, got a tensor of shape \[3\]"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_strategy_is_made(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        GradSyncStrategy(**arguments)


def test_one_rank_needs_nobody(run: Run) -> None:
    run(one_rank, ranks=1)


def one_rank() -> None:
    stock = fit(DDPStrategy())
    assert_equal(weights(fit(GradSyncStrategy(gs.Plan(compress=gs.int8())))), weights(stock))
    assert isinstance(stock, pl.LightningModule)
