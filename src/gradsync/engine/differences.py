"""What ranks hold differently: found by digests, put into a sentence with the first element and its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsync.engine.holdings import Holding
from gradsync.errors import listed
from gradsync.guard.agreement import share
from gradsync.kernels.digest import digest
from gradsync.transport.lane import Lane

_FEW = 16  # elements that are exchanged as they are
_WHAT = "the comparison of the replicas"


class Row(NamedTuple):
    """What a rank holds under a name."""

    name: str
    number: int  # of the optimizer; -1: of none
    parameter: str | None
    form: str
    digest: str


class Difference(NamedTuple):
    """Something that not all ranks hold alike."""

    name: str
    number: int
    parameter: str | None
    groups: tuple[tuple[int, ...], ...]  # ranks (by index in the group) that hold the same, the largest group first
    forms: tuple[str, ...]  # by rank

    @property
    def pattern(self) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """What makes it the same difference again."""
        return self.name, self.groups

    @property
    def decided(self) -> bool:
        """Whether anybody can say who is right: one group is larger than any other."""
        return len(self.groups[0]) > len(self.groups[1])

    @property
    def odd(self) -> list[int]:
        """The ranks that are wrong; all of them, where nobody knows."""
        return sorted(rank for group in self.groups[int(self.decided) :] for rank in group)

    @property
    def is_loose(self) -> bool:
        """Whether more than the elements of a tensor differ: a value, a shape, or it is missing."""
        return len(set(self.forms)) > 1


def compare(lane: Lane, mine: Sequence[Row]) -> list[Difference]:
    """What differs, in the order in which ranks hold it; every rank calls this at once."""
    documents = [
        {name: Row(name, *rest) for name, *rest in document["held"]} for document in share(lane, {"held": list(mine)})
    ]
    names = dict.fromkeys(name for document in documents for name in document)
    found = (difference_of([document.get(name) for document in documents]) for name in names)
    return [each for each in found if each is not None]


def difference_of(rows: Sequence[Row | None]) -> Difference | None:
    """How the ranks' rows of one name differ; None if they do not.

    >>> a, b = Row("w", -1, "w", "float32[2]", "1f"), Row("w", -1, "w", "float32[2]", "2e")
    >>> difference_of([a, b, a]).groups, difference_of([a, b]).decided, difference_of([a, a])
    (((0, 2), (1,)), False, None)
    """
    groups: dict[Row | None, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault(row, []).append(rank)
    if len(groups) == 1:
        return None
    there = next(row for row in rows if row is not None)
    ordered = sorted((tuple(ranks) for ranks in groups.values()), key=lambda ranks: (-len(ranks), ranks))
    forms = tuple("missing" if row is None else row.form for row in rows)
    return Difference(there.name, there.number, there.parameter, tuple(ordered), forms)


def account(lane: Lane, difference: Difference, holding: Holding | None) -> str:
    """The sentence; every rank calls this at once."""
    value = None if holding is None else holding.value
    if difference.is_loose or not isinstance(value, torch.Tensor):
        return told(difference.name, lane, difference, list(difference.forms))
    at, values = _first_element(lane, value)
    if not value.dim():
        return told(difference.name, lane, difference, values)
    index = [int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), value.shape)]
    return told(f"element {index} of {difference.name}", lane, difference, values)


def told(what: str, lane: Lane, difference: Difference, values: list[str]) -> str:
    """The values of the two largest groups."""
    usual, odd = difference.groups[:2]
    those, these = listed(lane.global_ranks(list(usual))), listed(lane.global_ranks(list(odd)))
    return f"{what} is {values[usual[0]]} on {those} but {values[odd[0]]} on {these}"


def _first_element(lane: Lane, tensor: torch.Tensor) -> tuple[int, list[str]]:
    """Where ranks differ first, and each one's value there."""
    flat = tensor.detach().reshape(-1)
    low, high = 0, flat.numel()
    while high - low > _FEW:
        middle = (low + high) // 2
        rows = lane.exchange(digest(flat[low:middle]).to_bytes(8, "little"), _WHAT)
        low, high = (middle, high) if all(row == rows[0] for row in rows) else (low, middle)
    raw = flat[low:high].resolve_conj().resolve_neg().contiguous().cpu().view(torch.uint8)
    rows = lane.exchange(bytes(raw.numpy()), _WHAT)
    item = flat.element_size()
    cells = [[row[i : i + item] for i in range(0, len(row), item)] for row in rows]
    first = next((i for i in range(high - low) if len({each[i] for each in cells}) > 1), 0)
    return low + first, [_shown(each[first], flat.dtype) for each in cells]


def _shown(raw: bytes, dtype: torch.dtype) -> str:
    """An element as a number, with as many digits as tell it from its neighbours; NaN with its bits."""
    element = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)[0]
    if not dtype.is_floating_point:
        return str(element.item())
    value = element.double().item()
    return (
        f"{value:.17g}"
        if dtype == torch.float64
        else f"{value:.9g}" + (f" ({raw[::-1].hex()})" if value != value else "")
    )
