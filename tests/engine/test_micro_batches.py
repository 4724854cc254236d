"""What stands in `.grad` counts by the weight of what came last: it is multiplied, or what is light is kept aside."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradsync.agreement.header import Flag, Head, Headers, pack_header
from gradsync.engine.bucket import GradEntry
from gradsync.engine.weighting import MicroBatches, Weighting


def entries_of(*numels: int) -> list[GradEntry]:
    params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    return [GradEntry(index, f"p{index}", param, {}, "", False) for index, param in enumerate(params)]


def bring(entry: GradEntry, value: float) -> None:
    """A backward adds this."""
    grad = torch.full_like(entry.param, value)
    entry.param.grad = grad if entry.param.grad is None else entry.param.grad + grad


def grads(entries: list[GradEntry]) -> list[float | None]:
    return [None if entry.param.grad is None else entry.param.grad[0].item() for entry in entries]


def window(k: int = 8, combine: str = "mean", numels: tuple[int, ...] = (2, 3)) -> tuple[list[GradEntry], MicroBatches]:
    entries = entries_of(*numels)
    return entries, MicroBatches(entries, Weighting(2, k, combine))  # type: ignore[arg-type]


def test_what_is_there_is_multiplied_before_something_of_another_weight_comes() -> None:
    entries, micro = window()
    micro.set_weight(3.0, 0, 0)
    assert micro.weigh()
    bring(entries[0], 10.0)
    micro.set_weight(5.0, 1, 1)
    assert micro.weigh()
    assert grads(entries) == [pytest.approx(6.0), None]
    for entry in entries:
        bring(entry, 1.0)
    assert micro.weigh(), "the same weight once more"
    assert grads(entries) == [pytest.approx(7.0), 1.0]
    assert micro._weighting.announced(Flag.NONE, 3) == (pytest.approx((3 + 5 + 5) / 3), Flag.WEIGHTED)
    assert micro._weighting.scale() == pytest.approx(5 / 16)


def test_what_is_far_lighter_is_kept_aside_and_added() -> None:
    entries, micro = window()
    micro.set_weight(64.0, 0, 0)
    assert micro.weigh()
    bring(entries[0], 10.0)
    micro.set_weight(1.0, 1, 1)
    assert micro.weigh(), "just a sixty-fourth is not too light"
    assert grads(entries) == [640.0, None]
    micro.set_weight(1 / 128, 2, 2)
    assert not micro.weigh()
    assert grads(entries) == [None, None]
    for entry in entries:
        bring(entry, 128.0)
    micro.merge()
    assert grads(entries) == [641.0, 1.0]
    micro.merge()
    assert grads(entries) == [641.0, 1.0], "once"


def test_weight_0_brings_nothing_even_of_nan() -> None:
    entries, micro = window()
    micro.set_weight(1.0, 0, 0)
    assert micro.weigh()
    bring(entries[0], 2.0)
    micro.set_weight(0.0, 1, 1)
    assert not micro.weigh()
    bring(entries[0], math.nan)
    bring(entries[1], math.nan)
    micro.nothing_came(2)
    assert grads(entries) == [2.0, 0.0]
    micro.set_weight(0.0, 0, 0)
    fresh, other = window()
    other.set_weight(0.0, 0, 0)
    assert other.weigh()
    bring(fresh[0], math.nan)
    other.set_weight(2.0, 1, 1)
    assert other.weigh()
    assert grads(fresh) == [None, None], "what weighed nothing is gone when something comes that weighs"


def test_where_nothing_was_brought_what_is_light_becomes_the_base() -> None:
    entries, micro = window()
    micro.set_weight(64.0, 0, 0)
    assert micro.weigh()
    micro.set_weight(1 / 128, 1, 1)
    assert micro.weigh()
    bring(entries[0], 1.0)
    assert micro._weighting.base == 1 / 128
    micro.nothing_came(1)
    assert micro._weighting.base == 1 / 128
    micro.nothing_came(0)
    assert micro._weighting.base is None


@pytest.mark.parametrize("combine", ["sum", "mean"])
def test_a_sum_that_was_synchronized_is_set_aside_once_and_added_again(combine: str) -> None:
    entries, micro = window(combine=combine)
    bring(entries[0], 5.0)
    micro.set_aside()
    assert grads(entries) == ([None, None] if combine == "sum" else [5.0, None])
    bring(entries[0], 1.0)
    bring(entries[1], 2.0)
    micro.set_aside()
    assert grads(entries) == ([1.0, 2.0] if combine == "sum" else [6.0, 2.0]), "what came since stays"
    micro.put_back()
    assert grads(entries) == [6.0, 2.0]
    micro.put_back()
    assert grads(entries) == [6.0, 2.0]
    micro.set_aside()
    micro.drop_aside()
    micro.put_back()
    assert grads(entries) == ([None, None] if combine == "sum" else [6.0, 2.0])


def test_under_no_sync_what_lies_between_two_calls_counts_as_one() -> None:
    """Without windows nobody counts micro-batches: a weight is for all backwards up to the next one."""
    _, micro = window(k=1)
    micro.set_weight(3.0, 9, 0)
    micro.set_weight(5.0, 9, 2)
    assert (micro._weighting.closed, micro._weighting.num_closed) == (3.0, 1)
    micro.set_weight(7.0, 9, 2)
    assert (micro._weighting.closed, micro._weighting.num_closed) == (3.0, 1), "no backward came in between"
    assert micro._weighting.announced(Flag.NONE, 1) == (3.0 + 7.0, Flag.WEIGHTED)
    micro.begin()
    assert micro._weighting.announced(Flag.NONE, 1) == (1.0, Flag.NONE)
    micro.set_weight(2.0, 0, 1)
    assert micro._weighting.num_closed == 1, "backwards are counted from the step's beginning"


def headers(weight: float, weighted: bool, size: int = 2) -> Headers:
    flags = int(Flag.WEIGHTED) if weighted else 0
    row = pack_header(Head(0, 0, weight, 1, -1, 1, flags, bytes(8)), bytearray(1))
    return Headers(torch.stack([row] * size))


def test_what_was_announced_before_a_step_holds_until_a_header_says_more() -> None:
    weighting = Weighting(2, 1, "mean")
    assert weighting.state()[3] == 0.0
    assert [math.isnan(number) for number in weighting.state()] == [True, True, False, False]
    for weight, unit in ((1.0, 1.0), (3.0, 2.0), (4.0, 4.0), (0.3, 0.25)):
        weighting.follow(headers(weight, True))
        assert weighting.unit == unit
    weighting.follow(headers(3.0, False))
    assert weighting.unit == 1.0
    weighting.follow(headers(0.0, True))
    assert weighting.unit == 1.0
    assert weighting.factor(headers(0.0, True)) == 1.0
    weighting.scale()
    assert weighting.factor(headers(4.0, True)) == 2 / 8
    summing = Weighting(2, 1, "sum")
    assert (summing.scale(), summing.factor(headers(4.0, True))) == (1.0, 1.0)


def test_a_unit_changes_what_is_brought_and_what_it_is_multiplied_by_together() -> None:
    weighting = Weighting(2, 3, "mean")
    weighting.follow(headers(24.0, True))
    assert weighting.unit == 8.0
    weighting.set(24.0, 0)
    scale = weighting.scale()
    assert scale == 24 / (2 * 3 * 8)
    weighting.follow(headers(1.0, False))
    assert scale * weighting.factor(headers(24.0, True)) * 2 == pytest.approx(1.0)
    assert weighting.scale() == 24 / (2 * 3)


@pytest.mark.parametrize("state", [(5.0, 3.0, 7.0, 2.0), (math.nan, math.nan, 0.0, 0.0), (5.0, math.nan, 1.0, 1.0)])
def test_a_state_is_the_same_after_it_was_loaded(state: tuple[float, ...]) -> None:
    weighting = Weighting(2, 4, "mean")
    weighting.set(9.0, 3)
    weighting.continue_at(4.0, state)
    assert weighting.unit == 4.0
    assert repr(weighting.state()) == repr(state)
    other = Weighting(2, 2, "mean")
    other.continue_from(weighting)
    assert (other.unit, other.weight) == (weighting.unit, weighting.weight)


def test_a_state_of_before_has_the_weight_alone_and_none_is_nothing() -> None:
    weighting = Weighting(2, 4, "mean")
    weighting.load((5.0,))
    assert weighting.state() == (5.0, 5.0, 0.0, 0.0)
    weighting.load(None)
    assert [math.isnan(number) for number in weighting.state()] == [True, True, False, False]


def test_it_tells_what_another_weight_does_to_what_is_there() -> None:
    weighting = Weighting(1, 4, "mean")
    assert not weighting.changes
    assert not weighting.comes_apart
    assert weighting.take_over() == 1.0
    assert not weighting.changes
    weighting.set(4.0, 1)
    assert weighting.changes
    assert weighting.take_over() == 0.25
    weighting.set(4.0 / 64, 2)
    assert not weighting.comes_apart
    weighting.set(4.0 / 65, 2)
    assert weighting.comes_apart
    assert weighting.lightness() == pytest.approx(1 / 65)
    weighting.nothing_there()
    assert not weighting.comes_apart
