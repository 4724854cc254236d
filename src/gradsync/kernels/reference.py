"""The results of the C kernels, computed in torch: the tests compare them bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_rows(rows: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """The rows added in order; half types in fp32, rounded once; floating ones scaled at the end.

    >>> sum_rows([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])], scale=0.5)
    tensor([2.0000, 3.5000])
    """
    dtype = rows[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row.to(wide)
    if dtype.is_floating_point:
        total *= scale
    return total.to(dtype)
