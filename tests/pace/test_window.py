"""The window of micro-batches: it closes at the k-th, and gradients are hidden and found again unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.agreement.header import Flag
from gradsync.pace.contract import OpenWindow
from gradsync.pace.window import WindowPace

Parameters = list[tuple[str, torch.nn.Parameter]]


def parameters(*grads: float | None) -> Parameters:
    """One parameter per gradient, named a, b, c, …"""
    made = []
    for message, grad in zip("abcdef", grads, strict=False):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = None if grad is None else torch.full((2,), grad)
        made.append((message, parameter))
    return made


def grads(of: Parameters) -> list[float | None]:
    return [None if p.grad is None else float(p.grad[0]) for _, p in of]


@given(k=st.integers(1, 9), per_batch=st.integers(1, 4))
def test_exactly_the_last_of_k_times_per_batch_backwards_averages(k: int, per_batch: int) -> None:
    window = WindowPace(gs.accumulate(k, per_batch), [])
    for done in range(1, k * per_batch + 1):
        last = done == k * per_batch
        assert window.streams == last
        assert window.after_backward(1, aborted=Flag.NONE) == last
        assert (window.micro_batches - 1) * per_batch < window.backwards <= window.micro_batches * per_batch
    assert window.micro_batches == k
    window.averaged()
    assert window.micro_batches == 0
    assert not window.mid_window


def test_every_step_is_a_window_of_one() -> None:
    window = WindowPace(gs.every_step(), [])
    assert window.streams
    assert window.after_backward(1, aborted=Flag.NONE)


def test_hidden_gradients_are_none_and_come_back_as_the_same_tensors() -> None:
    them = parameters(1.0, None, 3.0)
    window, tensors = WindowPace(gs.accumulate(3), them), [p.grad for _, p in them]
    window.after_backward(1, aborted=Flag.NONE)
    assert grads(them) == [None, None, None]
    window.before_backward()
    assert all(p.grad is tensor for (_, p), tensor in zip(them, tensors, strict=True))


def test_what_arrived_while_hidden_is_added() -> None:
    them = parameters(1.0, 2.0)
    window = WindowPace(gs.accumulate(3), them)
    window.after_backward(1, aborted=Flag.NONE)
    them[0][1].grad = torch.full((2,), 10.0)
    window.before_backward()
    assert grads(them) == [11.0, 2.0]


def test_showing_twice_adds_nothing() -> None:
    them = parameters(1.0)
    window = WindowPace(gs.accumulate(3), them)
    window.after_backward(1, aborted=Flag.NONE)
    window.before_backward()
    window.before_backward()
    assert grads(them) == [1.0]


def test_a_window_that_was_averaged_has_forgotten_what_it_hid() -> None:
    them = parameters(1.0)
    window = WindowPace(gs.accumulate(3), them)
    window.after_backward(1, aborted=Flag.NONE)
    window.averaged()
    window.before_backward()
    assert grads(them) == [None]


def test_a_backward_without_a_gradient_hides_only_in_an_open_window() -> None:
    them = parameters(1.0)
    window = WindowPace(gs.accumulate(2), them)
    window.put_away()
    assert grads(them) == [1.0]
    window.after_backward(1, aborted=Flag.NONE)
    window.before_backward()
    window.put_away()
    assert grads(them) == [None]


def test_a_sparse_gradient_hides_and_adds_too() -> None:
    them = parameters(None)
    window, parameter = WindowPace(gs.accumulate(2), them), them[0][1]
    parameter.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    window.after_backward(1, aborted=Flag.NONE)
    parameter.grad = torch.sparse_coo_tensor([[1]], [2.0], (2,), check_invariants=True)
    window.before_backward()
    assert parameter.grad.to_dense().tolist() == [1.0, 2.0]


def test_a_window_in_the_middle_survives_a_checkpoint() -> None:
    them = parameters(1.0, None)
    window = WindowPace(gs.accumulate(3), them)
    window.after_backward(2, aborted=Flag.NONE)
    held = window.open_window()
    window.before_backward()
    them[0][1].grad.add_(100)  # type: ignore[union-attr]  # what is held must not share memory with the run

    again = parameters(None, None)
    resumed = WindowPace(gs.accumulate(3), again)
    resumed.resume_window(held)
    assert resumed.backwards == 2
    resumed.before_backward()
    assert grads(again) == [1.0, None]


def test_closing_brings_everything_back() -> None:
    them = parameters(1.0)
    window = WindowPace(gs.accumulate(3), them)
    window.after_backward(1, aborted=Flag.NONE)
    window.close(together=True)
    assert grads(them) == [1.0]


@pytest.mark.parametrize("pace", [gs.every_step(), gs.accumulate(2)])
def test_a_fresh_window_holds_nothing(pace: object) -> None:
    assert WindowPace(pace, []).open_window() == OpenWindow(0, {})  # type: ignore[arg-type]
