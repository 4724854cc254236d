"""Means of tensors that travel seldom: of any form, in place, and nothing changes where all ranks have the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.exchange.group_cache import group_cache
from gradsync.exchange.means import average, level, mean_scale


def tensors(seed: int) -> list[torch.Tensor]:
    """Of several dtypes, with holes, of another order in memory on every other rank, empty, and of no dimension."""
    generator = torch.Generator().manual_seed(seed)
    random = [torch.randn(shape, generator=generator) for shape in ((2, 3, 4, 5), (6, 4), (0, 3), ())]
    if dist.get_rank() % 2:
        random[0] = random[0].contiguous(memory_format=torch.channels_last)
    return [random[0], random[1][:, ::2], random[1].double(), *random[2:], random[1].bfloat16()]


def means(equal: bool) -> None:
    world = dist.group.WORLD
    assert world is not None
    stand, size = group_cache(world), dist.get_world_size()
    exact = stand.exact(world, torch.device("cpu"), None)
    rows = [tensors(0 if equal else rank) for rank in range(size)]
    expected = [torch.stack(row).double().mean(0) for row in zip(*rows, strict=True)]
    for act in (average, level):
        mine = tensors(0 if equal else dist.get_rank())
        forms = [(each.data_ptr(), each.stride()) for each in mine]
        act(stand.lane, exact, mine)
        assert [(each.data_ptr(), each.stride()) for each in mine] == forms
        for each, mean in zip(mine, expected, strict=True):
            torch.testing.assert_close(
                each.double(), mean, rtol=0.02 if each.dtype == torch.bfloat16 else 1e-5, atol=0.02
            )
        if equal and act is level:
            assert all(torch.equal(each, was) for each, was in zip(mine, tensors(0), strict=True))


@pytest.mark.parametrize("equal", [True, False])
def test_tensors_become_their_means_where_they_lie(run: Callable[..., list[Any]], equal: bool) -> None:
    run(means, equal, ranks=3)


def mean_of_thirds() -> tuple[list[float], list[float]]:
    """Of a number that three thirds of do not make again."""
    world = dist.group.WORLD
    assert world is not None
    stand = group_cache(world)
    exact = stand.exact(world, torch.device("cpu"), None)
    odd = torch.tensor([0.1 + 0.2, 1 / 3, 1e-45, 2.0**-149 * 5])
    averaged, levelled = odd.clone(), odd.clone()
    average(stand.lane, exact, [averaged])
    level(stand.lane, exact, [levelled])
    assert torch.equal(levelled, odd)
    mine = torch.tensor([3.0, 6.0, 9.0][dist.get_rank()], dtype=torch.float64)
    average(stand.lane, exact, [mine])
    other = torch.tensor([3.0, 6.0, 9.0][dist.get_rank()], dtype=torch.float64)
    level(stand.lane, exact, [other])
    return [mine.item(), other.item()], averaged.tolist()


def test_three_ranks_with_the_same_keep_it_to_the_bit_and_others_get_their_mean(
    run: Callable[..., list[Any]],
) -> None:
    assert [means for means, _ in run(mean_of_thirds, ranks=3)] == [[6.0, 6.0]] * 3


def test_the_scales_of_all_ranks_add_up_to_one() -> None:
    assert sum(mean_scale(8) for _ in range(8)) == 1.0
    assert mean_scale(8, "sum", weight=5.0) == 1.0
