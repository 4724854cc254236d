"""The values that every result must have: whole numbers by rank and index whose sum is exact in any dtype and order."""

from __future__ import annotations

import torch

# Whole numbers up to here are exact; half types set it, the others need no more.
_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11}
_EXACT_ELSEWHERE = 2**20
# A prime: a chunk that was put or added in the wrong place does not fit there by accident.
_PERIOD = 65521


class ExpectedSums:
    """The numbers of one rank, and their sum over all ranks.

    Numbers repeat after `_PERIOD` elements: so few that filling a tensor leaves the rest of the cache alone.
    """

    def __init__(self, rank: int, world_size: int, dtype: torch.dtype, device: str = "cpu") -> None:
        highest = _EXACT.get(dtype, _EXACT_ELSEWHERE) // world_size
        assert highest >= 1, "max_ranks was asked before"
        each = [_draw(rank, highest) for rank in range(world_size)]
        self._mine = each[rank].to(device, dtype)
        self._sum = torch.stack(each).sum(0).to(device, dtype)

    def fill(self, tensor: torch.Tensor) -> None:
        """Put this rank's numbers into a flat tensor."""
        whole = tensor.numel() // _PERIOD * _PERIOD
        if whole:
            tensor[:whole].view(-1, _PERIOD).copy_(self._mine)
        tensor[whole:].copy_(self._mine[: tensor.numel() - whole])

    def count_wrong(self, tensor: torch.Tensor) -> int:
        """Return how many elements are not the sum over all ranks."""
        wrong = 0
        for part in tensor.split(_PERIOD):
            expected = self._sum[: part.numel()]
            if not torch.equal(part, expected):  # reads at full speed; counting does not
                wrong += int((part != expected).sum())
        return wrong


def max_ranks(dtype: torch.dtype) -> int:
    """The most ranks with which a sum of ones is exact.

    >>> max_ranks(torch.bfloat16)
    256
    """
    return _EXACT.get(dtype, _EXACT_ELSEWHERE)


def _draw(rank: int, highest: int) -> torch.Tensor:
    """Numbers from 0 to `highest`, by a seed: every rank can tell what every other brings."""
    return torch.randint(highest + 1, (_PERIOD,), generator=torch.Generator().manual_seed(rank))
