"""The window of micro-batches: it closes at the k-th, and gradients are hidden and found again unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.pace.window import Held, Window

Parameters = list[tuple[str, torch.nn.Parameter]]


def parameters(*grads: float | None) -> Parameters:
    """One parameter per gradient, named a, b, c, …"""
    made = []
    for letter, grad in zip("abcdef", grads, strict=False):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = None if grad is None else torch.full((2,), grad)
        made.append((letter, parameter))
    return made


def grads(of: Parameters) -> list[float | None]:
    return [None if p.grad is None else float(p.grad[0]) for _, p in of]


@given(k=st.integers(1, 9), per_batch=st.integers(1, 4))
def test_exactly_the_last_of_k_times_per_batch_backwards_closes(k: int, per_batch: int) -> None:
    window = Window(gs.accumulate(k, per_batch))
    for done in range(k * per_batch):
        assert not window.full
        assert window.closing == (done == k * per_batch - 1)
        window.backwards += 1
        assert (window.micro_batches - 1) * per_batch < window.backwards <= window.micro_batches * per_batch
    assert window.full
    assert window.micro_batches == k
    window.close()
    assert not window.full
    assert window.micro_batches == 0


def test_every_step_is_a_window_of_one() -> None:
    window = Window(gs.every_step())
    assert window.closing
    window.backwards = 1
    assert window.full


def test_hidden_gradients_are_none_and_come_back_as_the_same_tensors() -> None:
    window, them = Window(gs.accumulate(3)), parameters(1.0, None, 3.0)
    tensors = [p.grad for _, p in them]
    window.hide(them)
    assert grads(them) == [None, None, None]
    window.show(them)
    assert all(p.grad is tensor for (_, p), tensor in zip(them, tensors, strict=True))


def test_what_arrived_while_hidden_is_added() -> None:
    window, them = Window(gs.accumulate(3)), parameters(1.0, 2.0)
    window.hide(them)
    them[0][1].grad = torch.full((2,), 10.0)
    window.show(them)
    assert grads(them) == [11.0, 2.0]


def test_showing_twice_adds_nothing() -> None:
    window, them = Window(gs.accumulate(3)), parameters(1.0)
    window.hide(them)
    window.show(them)
    window.show(them)
    assert grads(them) == [1.0]


def test_a_closed_window_has_forgotten_what_it_hid() -> None:
    window, them = Window(gs.accumulate(3)), parameters(1.0)
    window.hide(them)
    window.close()
    window.show(them)
    assert grads(them) == [None]


def test_a_sparse_gradient_hides_and_adds_too() -> None:
    window, them = Window(gs.accumulate(2)), parameters(None)
    parameter = them[0][1]
    parameter.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    window.hide(them)
    parameter.grad = torch.sparse_coo_tensor([[1]], [2.0], (2,), check_invariants=True)
    window.show(them)
    assert parameter.grad.to_dense().tolist() == [1.0, 2.0]


def test_a_window_in_the_middle_survives_a_checkpoint() -> None:
    window, them = Window(gs.accumulate(3)), parameters(1.0, None)
    window.hide(them)
    window.backwards = 2
    state = window.state_dict()
    window.show(them)
    them[0][1].grad.add_(100)  # type: ignore[union-attr]  # the state must not share memory with the run

    resumed = Window(gs.accumulate(3))
    resumed.load_state_dict(state)
    resumed.show(them[1:] + parameters(None))
    assert resumed.backwards == 2
    again = parameters(None, None)
    resumed.load_state_dict(state)
    resumed.show(again)
    assert grads(again) == [1.0, None]


@pytest.mark.parametrize("pace", [gs.every_step(), gs.accumulate(2)])
def test_the_state_of_a_fresh_window_is_empty(pace: object) -> None:
    assert Window(pace).state_dict() == Held(0, {})  # type: ignore[arg-type]
