"""The plan that `gs.auto()` has chosen, as one more tensor in a state: text, in as many bytes before as after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from gradsync.plan.sync_plan import Plan

_KEY, _NBYTES = "gradsync.auto", 1024


class SavedChoice(NamedTuple):
    """Plain data, so that ranks can send it."""

    plan: dict[str, Any]  # in its canonical form
    predicted_s: float
    ranks: int  # for which it was chosen,
    allow: str  # and from what


def flatten(chosen: SavedChoice | None) -> dict[str, torch.Tensor]:
    """A choice as savers take it; None: nothing was chosen yet.

    >>> flatten(None)["gradsync.auto"].shape
    torch.Size([1024])
    """
    data = b"" if chosen is None else json.dumps(chosen._asdict()).encode()
    if len(data) > _NBYTES:  # no candidate is so long; a run that resumes would choose again
        data = b""
    return {_KEY: torch.frombuffer(bytearray(data.ljust(_NBYTES)), dtype=torch.uint8).clone()}


def read(state: Mapping[str, torch.Tensor]) -> SavedChoice | None:
    """Return what a state says of the choice.

    >>> chosen = SavedChoice(Plan().canonical(), 0.25, 2, "exact")
    >>> read(flatten(chosen)) == chosen, read({}), read("rank0.pt")
    (True, None, None)
    """
    if not isinstance(state, Mapping) or not isinstance(state.get(_KEY), torch.Tensor):
        return None  # what is no state at all is refused where the rest of it is read
    text = bytes(state[_KEY].cpu().numpy()).decode().strip()
    if not text:
        return None
    try:
        chosen = SavedChoice(**json.loads(text))
        Plan.from_canonical(chosen.plan)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_KEY} of this state is not what gs.auto() saved ({error}); load it as it was") from None
    return chosen
