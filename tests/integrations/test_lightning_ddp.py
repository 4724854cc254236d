"""Our hook under the DDP that Lightning's own DDPStrategy makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lightning")

from lightning.pytorch.strategies import DDPStrategy
from lightning_training import assert_equal, assert_replicas_equal, fit

import gradsync as gs
from global_state import changes, snapshot
from gradsync.integrations.lightning import GradSyncStrategy
from gradsync.integrations.lightning_ddp import DDPHook, average_bucket

Run = Callable[..., list[Any]]


def hooked(plan: gs.Plan, **options: Any) -> Any:
    hook = DDPHook(plan)
    strategy = DDPStrategy(ddp_comm_state=hook, ddp_comm_hook=average_bucket, find_unused_parameters=True)
    return fit(strategy, callbacks=[hook], **options)


def under_ddp() -> None:
    stock = fit(DDPStrategy(find_unused_parameters=True), accumulate_grad_batches=2)
    theirs = snapshot()
    exact = hooked(gs.Plan(), accumulate_grad_batches=2)
    assert changes(theirs, snapshot()) == []
    assert_equal(dict(exact.named_parameters()), dict(stock.named_parameters()))
    compressed = hooked(gs.Plan(compress=gs.int4()), max_epochs=4)
    assert_replicas_equal(compressed)
    assert sum(compressed.losses[-6:]) < 0.9 * sum(compressed.losses[:6])
    plainly = hooked(gs.Plan(), max_epochs=4)
    assert compressed.extra.weight.ne(plainly.extra.weight).any(), "nothing was compressed"
    with pytest.raises(TypeError, match="GradSyncStrategy made no DDP model"):
        fit(GradSyncStrategy(), callbacks=[DDPHook(gs.Plan())])


def test_the_hook_trains_what_ddp_trains_and_compresses_if_told(run: Run) -> None:
    run(under_ddp)


def test_a_hook_that_is_no_callback_says_so() -> None:
    with pytest.raises(ValueError, match=r"Trainer\(callbacks=\[hook\]\)"):
        average_bucket(DDPHook(gs.Plan()), None)  # type: ignore[arg-type]
