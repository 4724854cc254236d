"""A schedule is data, checked when it is made; chunks cover the data."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.algorithms.ring import ring
from gradsync.algorithms.schedule import Schedule, Transfer, chunk_bounds


@given(numel=st.integers(0, 10**12), num_chunks=st.integers(1, 300))
def test_chunks_cover_the_data_in_order_and_differ_by_at_most_one(numel: int, num_chunks: int) -> None:
    bounds = chunk_bounds(numel, num_chunks)
    assert len(bounds) == num_chunks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("numel", "num_chunks"), [(-1, 2), (4, 0), (4, -2)])
def test_chunks_of_nothing_are_refused(numel: int, num_chunks: int) -> None:
    with pytest.raises(ValueError, match=f"got {numel} and {num_chunks}"):
        chunk_bounds(numel, num_chunks)


@pytest.mark.parametrize(
    "transfer",
    [
        Transfer(0, 0, 0, True),
        Transfer(-1, 0, 0, True),
        Transfer(0, 3, 0, True),
        Transfer(3, 0, 0, False),
        Transfer(0, 1, 2, False),
        Transfer(0, 1, -1, False),
        Transfer(0, 1, 0, 1),  # type: ignore[arg-type]
        Transfer(0, True, 0, True),
    ],
)
def test_a_transfer_out_of_bounds_is_refused(transfer: Transfer) -> None:
    with pytest.raises(ValueError) as caught:
        Schedule(3, 2, ((), (transfer,)))
    assert str(caught.value) == (
        f"Schedule: round 2 has {transfer}, which is no transfer between two of 3 ranks of one of 2 chunks"
    )


@pytest.mark.parametrize("name", ["world_size", "num_chunks"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", None])
def test_counts_must_be_whole_and_positive(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"world_size": 2, "num_chunks": 2, "rounds": ()} | {name: value}
    with pytest.raises(ValueError, match=f"Schedule: {name} must be a whole number of at least 1"):
        Schedule(**fields)


def test_a_schedule_cannot_be_changed_and_compares_by_value() -> None:
    assert ring().schedule(5) == ring().schedule(5)
    assert hash(ring().schedule(5)) == hash(ring().schedule(5))
    assert ring().schedule(5) != ring().schedule(6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ring().schedule(5).world_size = 6  # type: ignore[misc]
