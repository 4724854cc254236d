"""A batch that raised on one rank, wherever that was and whatever surrounded it, is dropped by all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import CELLS, EVERYWHERE, PACES, WHERE, Cell, Told, expected, play

Ranks = Callable[..., list[Any]]
SAID = {"forward": "forward raised", "loader": "the loader raised"}


def play_all(cells: list[Cell], raising: list[int]) -> list[Told]:
    told = []
    for cell in cells:
        try:
            told.append(play(cell, raising))
        except BaseException as error:
            error.add_note(f"in the cell {cell}")
            raise
    return told


def check(cell: Cell, told: list[Told], raising: list[int]) -> None:
    value = expected(cell, len(told), raising)
    for each in told:
        assert torch.equal(each.weights, told[0].weights), cell
        if cell.pace != "diloco streaming":  # what was merged in the middle of its way has no short form
            assert torch.equal(each.weights, torch.full_like(each.weights, value)), (cell, each.weights[:, 0], value)
        assert each.num_synchronizations == told[0].num_synchronizations, cell
    for rank, each in enumerate(told):
        said = [message for message in each.warnings if "the batch is skipped" in message]
        what = SAID.get(cell.where, "backward did not finish")
        hears = cell.pace in EVERYWHERE or rank in raising
        assert len(said) == int(hears), (cell, each.warnings)
        for message in said:
            assert f"{what} on rank" in message, (cell, message)
            assert str(raising[0]) in message, (cell, message)
            assert ("a user's own exception" in message) == (rank in raising and cell.where in SAID), (cell, message)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("pace", PACES)
def test_all_ranks_drop_the_batch_that_raised(pace: str, where: str, run: Ranks) -> None:
    cells = [cell for cell in CELLS if cell.pace == pace and cell.where == where and not cell.refused]
    told = run(play_all, cells, [1])
    for cell, ranks in zip(cells, zip(*told, strict=True), strict=True):
        check(cell, list(ranks), [1])
