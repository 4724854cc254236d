"""The state as a flat dict, and who takes on whose part: without any rank."""

from __future__ import annotations

import pytest
import torch

from gradsync.checkpoint.format import Arrangement, OwnState, SavedRunState, SharedState, flatten, read, shorten
from gradsync.checkpoint.redistribute import StateSummary, assign


def test_shapes_say_nothing_of_values() -> None:
    """What torch.distributed.checkpoint needs: a template fits every state of its model and plan."""
    names = ["0.weight", "0.bias", "é"]
    young = SharedState(0, 2, 1.0, 0, "int8", Arrangement(names, [], False))
    old = SharedState(10**9, 2, 2.0**40, 3, "by_parameter" * 9, Arrangement(names[::-1], names[1:2], True))
    a, b = (flatten(SavedRunState(shared, {}, {})) for shared in (young, old))
    assert [(key, tensor.shape, tensor.dtype) for key, tensor in a.items()] == [
        (key, tensor.shape, tensor.dtype) for key, tensor in b.items()
    ]


def test_reading_undoes_flattening() -> None:
    shapes = {"a.weight": (2, 3), "b": (1,)}
    shared = SharedState(7, 3, 0.5, 2, shorten("x" * 1000), Arrangement(["b", "a.weight"], ["b"], True))
    part = OwnState({"a.weight": torch.rand(2, 3)}, {"b": torch.rand(1)}, 1, (2.5, 0.5, 7.0, 2.0))
    again = read(flatten(SavedRunState(shared, {"a.weight": torch.rand(3, 2)}, {2: part})), shapes)
    assert again is not None
    assert again.shared == shared
    assert again.parts[2].weight == (2.5, 0.5, 7.0, 2.0)
    assert torch.equal(again.parts[2].residuals["a.weight"], part.residuals["a.weight"])
    assert torch.equal(again.parts[2].hidden["b"], part.hidden["b"])
    assert not again.parts[2].torn


def summaries(brings: list[list[int]], before: int, keeps: list[int]) -> list[StateSummary]:
    """Who brings which old ranks' parts, and how many residuals each keeps now."""
    return [
        StateSummary(None, "same" if parts else None, 4, before, dict.fromkeys(map(str, parts), 1), False, count)
        for parts, count in zip(brings, keeps, strict=True)
    ]


@pytest.mark.parametrize("before", range(1, 6))
@pytest.mark.parametrize("after", range(1, 6))
def test_every_part_goes_to_one_rank(before: int, after: int) -> None:
    everything = list(range(before))
    for brings in ([everything] * after, [everything] + [[]] * (after - 1)):
        redistribution = assign(summaries(brings, before, [1] * after))
        assert [each.old for each in redistribution.moves] == everything
        assert [each.owner for each in redistribution.moves] == [old % after for old in everything]
        assert all(each.old in brings[each.source] for each in redistribution.moves)
        assert redistribution.lost == []
        assert redistribution.whole == (before == after)


def test_a_residual_goes_to_a_rank_that_compresses() -> None:
    """Across hosts the first rank of each host alone does: ranks 0 and 2 of 4 here."""
    redistribution = assign(summaries([[0], [1], [2], [3]], 4, [5, 0, 5, 0]))
    assert [each.owner for each in redistribution.moves] == [0, 2, 2, 2]
    assert not redistribution.whole
