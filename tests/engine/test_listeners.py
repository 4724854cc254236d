"""Who listens is called at each moment in its order, until it is taken back; and hears of steps of other ranks, too."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.engine.listeners import Listeners, moments_of
from gradsync.launch.spawn import RankPool


def leave_one_out(left_out: int) -> list[bool]:
    """In one step rank 1's loss touches no parameter: what its listener hears of each synchronization."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync, heard = gs.attach(model, optimizer), list[bool]()
    sync._steps.tell(synchronized=heard.append)
    for step in range(4):
        optimizer.zero_grad()
        if step != left_out or dist.get_rank() != 1:
            model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    sync.detach()
    return heard


def test_a_step_counts_for_the_ranks_that_ran_a_backward(pool: RankPool) -> None:
    assert pool.run(leave_one_out, 2, ranks=2) == [[True] * 4, [True, True, False, True]]


class Ear:
    """It hears of two moments, and has another method."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def border(self) -> None:
        self._said.append(f"{self._name} border")

    def synchronized(self, counts: bool) -> None:
        self._said.append(f"{self._name} {counts}")

    def other(self) -> None:
        raise AssertionError


def test_listeners_are_called_in_their_order_until_they_are_taken_back() -> None:
    listeners, said = Listeners(), list[str]()
    first, second, third = (Ear(name, said) for name in ("first", "second", "third"))
    assert set(moments_of(first)) == {"border", "synchronized"}
    listeners.add(**moments_of(second))
    listeners.add(**moments_of(third))
    listeners.add(first=True, **moments_of(first))
    for hear in listeners.border:
        hear()
    assert said == ["first border", "second border", "third border"]
    listeners.remove(**moments_of(second))
    said.clear()
    for hear in listeners.border:
        hear()
    for counted in listeners.synchronized:
        counted(False)
    assert said == ["first border", "third border", "first False", "third False"]
    assert not listeners.came


def test_who_is_added_while_others_are_told_hears_of_the_next_moment() -> None:
    listeners, said = Listeners(), list[str]()
    late = Ear("late", said)
    listeners.add(border=lambda: listeners.add(**moments_of(late)))
    for hear in listeners.border:
        hear()
    assert said == []
    listeners.border[-1]()
    assert said == ["late border"]
