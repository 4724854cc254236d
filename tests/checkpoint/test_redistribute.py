"""The state as a flat dict, and who takes on whose part: without any rank."""

from __future__ import annotations

import pytest
import torch

from gradsync.checkpoint.format import Arrangement, Part, SavedRunState, Shared, fitting, flatten, read
from gradsync.checkpoint.redistribute import Claim, deal


def test_shapes_say_nothing_of_values() -> None:
    """What torch.distributed.checkpoint needs: a template fits every state of its model and plan."""
    names = ["0.weight", "0.bias", "é"]
    young = Shared(0, 2, 1.0, 0, "int8", Arrangement(names, [], False))
    old = Shared(10**9, 2, 2.0**40, 3, "by_parameter" * 9, Arrangement(names[::-1], names[1:2], True))
    a, b = (flatten(SavedRunState(shared, {}, {})) for shared in (young, old))
    assert [(key, tensor.shape, tensor.dtype) for key, tensor in a.items()] == [
        (key, tensor.shape, tensor.dtype) for key, tensor in b.items()
    ]


def test_reading_undoes_flattening() -> None:
    shapes = {"a.weight": (2, 3), "b": (1,)}
    shared = Shared(7, 3, 0.5, 2, fitting("x" * 1000), Arrangement(["b", "a.weight"], ["b"], True))
    part = Part({"a.weight": torch.rand(2, 3)}, {"b": torch.rand(1)}, 1, (2.5, 0.5, 7.0, 2.0))
    again = read(flatten(SavedRunState(shared, {"a.weight": torch.rand(3, 2)}, {2: part})), shapes)
    assert again is not None
    assert again.shared == shared
    assert again.parts[2].weight == (2.5, 0.5, 7.0, 2.0)
    assert torch.equal(again.parts[2].residuals["a.weight"], part.residuals["a.weight"])
    assert torch.equal(again.parts[2].hidden["b"], part.hidden["b"])
    assert not again.parts[2].torn


def claims(brings: list[list[int]], before: int, keeps: list[int]) -> list[Claim]:
    """Who brings which old ranks' parts, and how many residuals each keeps now."""
    return [
        Claim(None, "same" if parts else None, 4, before, dict.fromkeys(map(str, parts), 1), False, count)
        for parts, count in zip(brings, keeps, strict=True)
    ]


@pytest.mark.parametrize("before", range(1, 6))
@pytest.mark.parametrize("after", range(1, 6))
def test_every_part_goes_to_one_rank(before: int, after: int) -> None:
    everything = list(range(before))
    for brings in ([everything] * after, [everything] + [[]] * (after - 1)):
        hand = deal(claims(brings, before, [1] * after))
        assert [each.old for each in hand.deals] == everything
        assert [each.owner for each in hand.deals] == [old % after for old in everything]
        assert all(each.old in brings[each.source] for each in hand.deals)
        assert hand.lost == []
        assert hand.whole == (before == after)


def test_a_residual_goes_to_a_rank_that_compresses() -> None:
    """Across hosts the first rank of each host alone does: ranks 0 and 2 of 4 here."""
    hand = deal(claims([[0], [1], [2], [3]], 4, [5, 0, 5, 0]))
    assert [each.owner for each in hand.deals] == [0, 2, 2, 2]
    assert not hand.whole
