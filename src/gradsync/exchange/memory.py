"""Where flat tensors live: in the team's memory if they are summed there, so that no copy is needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import compress
from typing import NamedTuple

import torch

from gradsync.errors import NotEnoughMemory
from gradsync.transport.team import Team

_ALIGN_NBYTES = 4096


class Form(NamedTuple):
    """A flat tensor to be."""

    numel: int
    dtype: torch.dtype
    device: torch.device


Allocate = Callable[[list[Form]], list[torch.Tensor]]


def zeros(forms: list[Form]) -> list[torch.Tensor]:
    """In ordinary memory."""
    return [torch.zeros(form.numel, dtype=form.dtype, device=form.device) for form in forms]


def carve(team: Team, forms: list[Form], shared: list[bool]) -> list[torch.Tensor]:
    """Zeros; those marked `shared` in one piece of the team's memory, if there is enough."""
    inside = list(compress(forms, shared))
    sizes = [-(-form.numel * form.dtype.itemsize // _ALIGN_NBYTES) * _ALIGN_NBYTES for form in inside]
    try:
        memory = team.allocate(sum(sizes))
    except NotEnoughMemory as error:
        warnings.warn(f"{error}; gradients are staged through a small window instead", stacklevel=7)
        return zeros(forms)
    parts = iter(
        part[: form.numel * form.dtype.itemsize].view(form.dtype)
        for form, part in zip(inside, memory[: sum(sizes)].split(sizes), strict=True)
    )
    return [next(parts) if here else zeros([form])[0] for form, here in zip(forms, shared, strict=True)]
