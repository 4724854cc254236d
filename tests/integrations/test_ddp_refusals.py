"""What a DDP hook cannot do is refused at the door with the way out; what breaks later has our names on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import batches, loss_of, mlp, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.launch.spawn import RankPool

Run = Callable[..., list[Any]]


def refused_arguments() -> None:
    ddp = DistributedDataParallel(mlp())
    for plan, words in (
        (gs.Plan(pace=gs.accumulate(2)), r"pace=.* ddp\.no_sync\(\)"),
        (gs.Plan(overlap="none"), "overlap='none' .* DDP decides"),
        (gs.Plan(bucket_bytes=1 << 20), "bucket_cap_mb=1 "),
        (gs.Plan(combine="sum"), "multiply the loss"),
    ):
        with pytest.raises(ValueError, match=words):
            gs.ddp_hook(plan, ddp)
    with pytest.raises(TypeError, match=r"plan must be a gs\.Plan, got 'int8'"):
        gs.ddp_hook("int8", ddp)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nonfinite='raise'.* no header"):
        gs.ddp_hook(gs.Plan(), ddp, guard=gs.Guard(nonfinite="raise"))
    with pytest.raises(TypeError, match=r"takes a DistributedDataParallel, got Sequential.* gs\.attach"):
        gs.ddp_hook(gs.Plan(), ddp.module)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parameter weight has sparse gradients"):
        gs.ddp_hook(gs.Plan(), DistributedDataParallel(nn.Embedding(4, 4, sparse=True)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_ddp_decides_itself_is_refused(ranks: int, run: Run) -> None:
    run(refused_arguments, ranks=ranks)


def different_plans() -> None:
    ddp = DistributedDataParallel(mlp())
    plan = gs.Plan(compress=gs.int8() if dist.get_rank() else gs.int4())
    with pytest.raises(gs.Disagreement, match="the plans differ: compress is"):
        gs.ddp_hook(plan, ddp)
    one_refuses = gs.Plan(combine="sum" if dist.get_rank() else "mean")
    with pytest.raises(gs.Disagreement, match=r"rank 1 refused to attach: combine='sum'.* multiply the loss"):
        gs.ddp_hook(one_refuses, ddp)


def test_ranks_with_different_plans_all_say_so(run: Run) -> None:
    run(different_plans)


def wrong_model() -> None:
    state, hook = gs.ddp_hook(gs.Plan(), DistributedDataParallel(mlp()))
    other = DistributedDataParallel(mlp())
    other.register_comm_hook(state, hook)
    with pytest.raises(gs.GradSyncError, match="made for another model"):
        loss_of(other, batches(16, 9)()).backward()
    state.close()


def test_a_hook_on_another_model_is_noticed(run: Run) -> None:
    run(wrong_model)


def closed() -> None:
    ddp, state = wrap(mlp(), gs.Plan())
    assert state is not None
    state.close()
    with pytest.raises(gs.GradSyncError, match="this DDP hook was closed"):
        loss_of(ddp, batches(16, 9)()).backward()


def test_a_closed_hook_says_so(run: Run) -> None:
    run(closed)


def one_leaves_early() -> None:
    ddp, state = wrap(mlp(), gs.Plan())
    assert state is not None
    if dist.get_rank():
        state.close()
        return
    with pytest.raises(gs.Disagreement, match=r"bucket 0 of DDP on rank 0 but close\(\) on rank 1"):
        loss_of(ddp, batches(16, 9)()).backward()
    state.close()


def test_a_rank_that_closes_while_another_trains_is_named(run: Run) -> None:
    run(one_leaves_early)


def lose_a_rank(compress: Any) -> tuple[str, list[int], str]:
    torch.manual_seed(7)
    model = mlp()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008)
    state, hook = gs.ddp_hook(gs.Plan(compress=compress), ddp, guard=gs.Guard(timeout=20, dead_after=1.5))
    ddp.register_comm_hook(state, hook)
    batch = batches(16, 9)
    for step in range(4):
        loss = loss_of(ddp, batch())
        if (dist.get_rank(), step) == (1, 3):
            # After the first bucket has left.
            model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            loss.backward()
        except gs.PeerLost as error:
            with pytest.raises(gs.GradSyncError, match="earlier synchronization failed"):
                state.load_state_dict({})
            return type(error).__name__, list(error.ranks), str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("compress", [None, gs.powersgd(2)], ids=repr)
def test_a_killed_rank_is_named_by_the_others(compress: Any, pool: RankPool) -> None:
    outcomes = pool.outcomes(lose_a_rank, compress, ranks=3, timeout=60)
    assert "SIGKILL" in outcomes[1].text
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].text
        kind, ranks, text = outcomes[rank].value
        assert (kind, ranks) == ("PeerLost", [1])
        assert text.startswith(f"[rank {rank}/3 step 3 bucket ")
        assert "while this rank was in bucket" in text
        assert "weight" in text
