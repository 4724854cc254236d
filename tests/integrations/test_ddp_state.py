"""A run that stops and resumes goes on to the bit, though DDP begins with other buckets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import assert_close, assert_equal, batches, loss_of, mlp, wrap

import gradsync as gs

Run = Callable[..., list[Any]]

KEEPING = {
    "int8": gs.int8(),
    "stochastic": gs.int8(rounding="stochastic"),
    "topk": gs.topk(0.05),
    "randomk": gs.randomk(0.05),
    "powersgd": gs.powersgd(2),
    "mixed": gs.by_parameter({"*.bias": None, "0.*": gs.int4(), "*": gs.powersgd(2)}),
}


def _steps(ddp: Any, optimizer: torch.optim.Optimizer, batch: Callable[[], torch.Tensor], num: int) -> None:
    for _ in range(num):
        loss_of(ddp, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed_goes_on(name: str) -> None:
    plan = gs.Plan(compress=KEEPING[name])
    torch.manual_seed(7)
    model, batch = mlp(), batches(16, 9)
    ddp, state = wrap(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert state is not None
    _steps(ddp, optimizer, batch, 4)
    saved = {key: tensor.clone() for key, tensor in state.state_dict().items()}
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    later = batches(16, 9)
    for _ in range(4):
        later()
    _steps(ddp, optimizer, batch, 4)

    again = mlp()
    again.load_state_dict(weights)
    ddp_again, state_again = wrap(again, plan)
    assert state_again is not None
    state_again.load_state_dict(saved)
    assert_equal(state_again.state_dict(), saved)
    _steps(ddp_again, torch.optim.SGD(again.parameters(), lr=0.1), later, 4)
    same = assert_close if "powersgd" in repr(plan.compress).lower() else assert_equal
    same(dict(again.named_parameters()), dict(model.named_parameters()))
    same(state_again.residuals(), state.residuals())
    assert state_again.state_dict()["gradsync.step"] == 8
    state.close()
    state_again.close()


@pytest.mark.parametrize("name", KEEPING)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(name: str, run: Run) -> None:
    run(resumed_goes_on, name)


def state_has_one_form() -> None:
    ddp, state = wrap(mlp(), gs.Plan(compress=KEEPING["mixed"]))
    assert state is not None
    shapes = {key: tensor.shape for key, tensor in state.state_dict().items()}
    loss_of(ddp, batches(16, 9)()).backward()
    assert {key: tensor.shape for key, tensor in state.state_dict().items()} == shapes
    state.close()


def test_a_state_has_the_same_form_before_and_after_the_first_step(run: Run) -> None:
    run(state_has_one_form)


def strange_states() -> None:
    _, state = wrap(mlp(), gs.Plan(compress=gs.int8()))
    assert state is not None
    saved = state.state_dict()
    with pytest.raises(ValueError, match="another model"):
        state.load_state_dict({key: t for key, t in saved.items() if "order" not in key} | _order(["strange"]))
    with pytest.raises(ValueError, match="format"):
        state.load_state_dict({"strange": torch.zeros(1)})
    other = dict.fromkeys(("gradsync.step", "gradsync.rank1.step"), torch.tensor(5)) if dist.get_rank() == 1 else {}
    with pytest.raises(gs.Disagreement, match="different states"):
        state.load_state_dict(saved | other)
    state.load_state_dict(saved)  # nothing has happened to it
    state.close()


def _order(names: list[str]) -> dict[str, torch.Tensor]:
    text = str(names).replace("'", '"').encode()
    return {"gradsync.order": torch.frombuffer(bytearray(text), dtype=torch.uint8), "gradsync.held": torch.zeros(1)}


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(run: Run) -> None:
    run(strange_states)


def hook_and_attach_share_states() -> None:
    plan = gs.Plan(compress=KEEPING["mixed"])
    torch.manual_seed(7)
    model, batch = mlp(), batches(16, 9)
    ddp, state = wrap(model, plan)
    assert state is not None
    _steps(ddp, torch.optim.SGD(model.parameters(), lr=0.1), batch, 3)
    sync = gs.attach(mlp(), plan=plan)
    sync.load_state_dict(state.state_dict())
    assert_equal(sync.state_dict(), state.state_dict())
    _, other = wrap(mlp(), plan)
    assert other is not None
    other.load_state_dict(sync.state_dict())
    assert_equal(other.state_dict(), state.state_dict())
    sync.detach()
    state.close()
    other.close()


def test_a_hook_and_attach_take_each_others_states(run: Run) -> None:
    run(hook_and_attach_share_states)


def save_after_steps(folder: Path) -> None:
    torch.manual_seed(7)
    model = mlp()
    ddp, state = wrap(model, gs.Plan(compress=gs.int8()))
    assert state is not None
    _steps(ddp, torch.optim.SGD(model.parameters(), lr=0.1), batches(16, 9), 3)
    torch.save(state.state_dict(), folder / f"{dist.get_rank()}.pt")
    state.close()


def fewer_ranks_take_over(folder: Path) -> None:
    saved = [torch.load(folder / f"{rank}.pt") for rank in range(3)]
    _, state = wrap(mlp(), gs.Plan(compress=gs.int8()))
    assert state is not None
    state.load_state_dict({key: tensor for each in saved for key, tensor in each.items()})
    for name, residual in state.residuals().items():
        dist.all_reduce(residual)
        owed = sum(each[f"gradsync.rank{rank}.residual.{name}"] for rank, each in enumerate(saved))
        torch.testing.assert_close(residual, owed)
    state.close()


def test_other_numbers_of_ranks_take_over_all_residuals(run: Run, tmp_path: Path) -> None:
    run(save_after_steps, tmp_path, ranks=3)
    run(fewer_ranks_take_over, tmp_path, ranks=2)
