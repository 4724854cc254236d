"""Ranks that launch different buckets all raise the same sentence, and nothing of that step reaches `.grad`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.launch.spawn import RankPool

ALGORITHMS: dict[str, Any] = {
    "shared_memory": None,
    "native": gs.native(),
    "ring": gs.ring(),
    "tree": gs.tree(),
    "halving_doubling": gs.halving_doubling(),
}


def swap(algorithm: str, widths: list[int], first: bool, compress: Any = None) -> tuple[str, list[Any], list[str]]:
    """Rank 1 launches its first two buckets in another order, in the first synchronization or in the third."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, width, bias=False) for width in widths])
    plan = gs.Plan(algorithm=ALGORITHMS[algorithm], bucket_bytes=1024, compress=compress)
    sync = gs.attach(model, None, plan)
    lines: list[Any] = []
    sync._synchronization.health_log.listen(lines.append)
    said = ""
    for step in range(3):
        if step == (0 if first else 2) and dist.get_rank() == 1:
            buckets = sync._synchronization.bucket_order.buckets
            buckets[0], buckets[1] = buckets[1], buckets[0]
        try:
            x = torch.randn(2, 4)
            torch.stack([layer(x).square().sum() for layer in model]).sum().backward()
        except gs.GradSyncError as error:
            said = f"{type(error).__name__}: {error}"
            break
        model.zero_grad()
    sync.detach()
    return said, [param.grad for param in model.parameters()], [line.what for line in lines]


@pytest.fixture(scope="module")
def run(warm: Any) -> Iterator[Any]:
    """Ranks of their own: a message that another rank never sends stays under way until its process ends."""
    with RankPool(3, threads=1, context=warm) as ranks:
        ranks.run(dist.get_rank)  # all of them are there before the first test
        yield ranks.run


def check(results: Any, step: int, names: tuple[str, str]) -> None:
    sentence = (
        f"Disagreement: the ranks launched different buckets in synchronization {step}: number 0 was bucket 0 "
        f"({names[0]}) on ranks 0 and 2 but bucket 1 ({names[1]}) on rank 1; no rank has used anything of it. Restart "
        "all ranks from the last checkpoint"
    )
    assert [said for said, _, _ in results] == [sentence] * 3
    assert all(grads == [None] * len(grads) for _, grads, _ in results)
    assert all(whats == ["order"] for _, _, whats in results)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("widths", [[256, 256, 256], [256, 300, 700]], ids=["equal sizes", "unequal sizes"])
def test_another_order_is_the_same_sentence_everywhere(algorithm: str, widths: list[int], run: Any) -> None:
    check(run(swap, algorithm, widths, False), 2, ("2.weight", "1.weight"))


@pytest.mark.parametrize("algorithm", ["shared_memory", "native"])
def test_also_in_the_first_synchronization(algorithm: str, run: Any) -> None:
    check(run(swap, algorithm, [256, 300, 700], True), 0, ("2.weight", "1.weight"))


def test_also_where_buckets_are_compressed(run: Any) -> None:
    check(run(swap, "native", [256, 300, 700], False, gs.int8()), 2, ("2.weight", "1.weight"))
