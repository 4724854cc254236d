"""A flat set: its tensors travel whole, in flat parts that leave one after the other and keep one residual."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transits import open_exchange, random

import gradsync as gs
from gradsync.exchange.flat_sets import FlatPart, FlatSet
from gradsync.exchange.sender import GradientExchange

SHAPES = {"weight": (8, 8), "bias": (10,), "embedding": (20, 3)}


def flat_set_of(exchange: GradientExchange, max_nbytes: int | None, num_flat_parts: int) -> FlatSet:
    named = [(name, torch.empty(shape)) for name, shape in SHAPES.items()]
    return FlatSet(named, exchange.exact, exchange.sender, count(7), max_nbytes, num_flat_parts)


def add_up(
    exchange: GradientExchange, flat_set: FlatSet, flat_part: FlatPart, brought: list[torch.Tensor]
) -> torch.Tensor:
    """What arrives, in one piece."""
    torch._foreach_copy_(flat_part.views, brought)
    for pending in flat_set.launch(flat_part):
        exchange.lane.wait(pending)
    return torch.cat([view.flatten() for view in flat_part.views])


def brought_by(rank: int) -> list[torch.Tensor]:
    return [random(rank, *shape) for shape in SHAPES.values()]


def sum_of_all() -> torch.Tensor:
    rows = [torch.cat([each.flatten() for each in brought_by(rank)]) for rank in range(dist.get_world_size())]
    return torch.stack(rows).sum(0)


def travel_as_they_are(max_nbytes: int | None) -> list[list[str]]:
    exchange = open_exchange(gs.Plan(), "aa")
    flat_set = flat_set_of(exchange, max_nbytes, num_flat_parts=2)
    for flat_part in flat_set.flat_parts:
        assert torch.equal(add_up(exchange, flat_set, flat_part, brought_by(dist.get_rank())), sum_of_all())
        for flat_bucket in flat_part.flat_buckets:
            assert flat_set.describe(flat_bucket.index) == flat_bucket.describe()
    assert flat_set.names == list(SHAPES)
    assert flat_set.describe(6) is None
    return [[item.name for item in flat_bucket.items] for flat_bucket in flat_set.flat_parts[0].flat_buckets]


def test_every_flat_part_becomes_the_sum_in_buckets_of_at_most_the_bytes_asked_for(run: Any) -> None:
    assert run(travel_as_they_are, 1) == [[[name] for name in SHAPES]] * 2
    assert run(travel_as_they_are, None) == [[list(SHAPES)]] * 2


def leave_half_behind(begin_again: bool) -> None:
    exchange = open_exchange(gs.Plan(compress=gs.topk(0.5, block=32)), "aa")
    flat_set = flat_set_of(exchange, None, num_flat_parts=2)
    elder, younger = flat_set.flat_parts
    truth, nothing = sum_of_all(), [torch.zeros(shape) for shape in SHAPES.values()]
    first = add_up(exchange, flat_set, elder, brought_by(dist.get_rank()))
    assert (first - truth).norm() > 0.1 * truth.norm(), "half of it stays behind"
    if begin_again:
        exchange.sender.replace(exchange.sender.kept())
        flat_set.register()
    rest = add_up(exchange, flat_set, younger, nothing)
    assert (first + rest - truth).norm() <= 0.01 * truth.norm()  # what is sent is rounded to 16 bits
    assert add_up(exchange, flat_set, elder, nothing).norm() <= 0.01 * truth.norm()


@pytest.mark.parametrize("begin_again", [False, True])
def test_what_one_flat_part_does_not_send_leaves_with_the_next(begin_again: bool, run: Any) -> None:
    run(leave_half_behind, begin_again)
