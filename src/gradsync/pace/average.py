"""One average of gradients, from its departure until a later step applies it.

It may be under way, or have landed and wait; what is saved has landed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradsync.errors import Disagreement
from gradsync.exchange.fleet import Ship
from gradsync.guard.findings import Found
from gradsync.guard.header import Headers, Mark
from gradsync.guard.verdict import Verdict, spoiled, step_verdict
from gradsync.pace.contract import Site, State
from gradsync.pace.passage import Passage, first_nonfinite, land

_COUNTS, _DROPPED = -1, -2  # otherwise: the number of the parameter because of which it raises


class Average:
    """Of all gradients of one backward."""

    def __init__(self, views: list[torch.Tensor], scale: float, passage: Passage | None = None) -> None:
        self.views = views
        self.scale = scale  # a GradScaler's, when the gradients were made
        self.used = bytes(len(views))  # 1 where any rank had a gradient
        self.found = ""  # where a NaN or Inf is that must be raised
        self.afterwards: Callable[[], None] = _nothing  # what all ranks do about replicas that differ
        self._fate = _COUNTS
        self._passage = passage

    @property
    def dropped(self) -> bool:
        """Whether it came to nothing, on every rank."""
        return self._fate != _COUNTS

    def land(self, site: Site) -> None:
        """Wait until it is back, and judge it; every rank comes to the same."""
        if self._passage is None:
            return
        passage, self._passage = self._passage, None
        headers = land(site, passage)
        _check_scales(headers, site)
        self.afterwards = site.watch.hear(headers, site.lane)
        self.used = headers.any(Mark.USED)
        names = [name for name, _ in site.parameters]
        verdict, self.found = step_verdict(site.lane, site.guard, headers, names, site.findings)
        at = next((head.nonfinite for head in headers.heads if head.nonfinite >= 0), -1)
        if verdict is Verdict.COUNTS and (at := _overflow(passage.ship, site)) >= 0:
            overflow = f"compression made NaN or Inf of the average gradient of {names[at]}"
            verdict, self.found = spoiled(site.lane, site.guard, Found(overflow, [], names[at], None), site.findings)
        if verdict is Verdict.COUNTS:
            site.findings.counted()
        self._fate = {Verdict.COUNTS: _COUNTS, Verdict.DROPPED: _DROPPED, Verdict.RAISES: at}[verdict]

    def leave(self, ship: Ship, site: Site) -> None:
        """Make room, if it lies in this ship: so many wait only after a run with a smaller k took them over."""
        if self.views is ship.views:
            self.land(site)
            self.views = [view.clone() for view in self.views]

    def rescale(self, scale: float) -> None:
        """As if the gradients had been made with this scale."""
        if scale != self.scale:
            torch._foreach_mul_(self.views, scale / self.scale)
            self.scale = scale

    def state(self, names: list[str]) -> State:
        """Copies, of what has landed."""
        return {
            "fate": torch.tensor(self._fate, device="cpu"),
            "scale": torch.tensor(self.scale, dtype=torch.float64, device="cpu"),
            "used": torch.tensor(list(self.used), dtype=torch.uint8, device="cpu"),
            **{f"of.{name}": view.clone() for name, view in zip(names, self.views, strict=True)},
        }

    @classmethod
    def from_state(cls, state: State, site: Site) -> Average:
        """The same, in memory of its own."""
        views = [torch.empty_like(p.detach()).copy_(state[f"of.{name}"]) for name, p in site.parameters]
        average = cls(views, float(state["scale"]))
        average.used = bytes(state["used"].tolist())
        average._fate = int(state["fate"])
        if average._fate >= 0:
            average.found = f"a rank had NaN or Inf in the gradient of {site.parameters[average._fate][0]}"
        return average


def _nothing() -> None: ...


def _check_scales(headers: Headers, site: Site) -> None:
    """Ranks that scale differently would add up unlike things."""
    ranks, first = site.lane.groups.ranks, headers.heads[0]
    for rank, head in zip(ranks, headers.heads, strict=True):
        if head.weight != first.weight:
            raise Disagreement(
                f"the GradScaler of rank {rank} has scale {head.weight:g} and that of rank {ranks[0]} "
                f"{first.weight:g}: make them alike, and load their state on every rank"
            )


def _overflow(ship: Ship, site: Site) -> int:
    """Where compression made a NaN or Inf of finite gradients, or -1."""
    if site.guard.nonfinite == "allow":
        return -1
    coded = [parcel for parcel in ship.parcels if parcel.choice.codec is not None]
    return -1 if all(bool(parcel.flat.sum().isfinite()) for parcel in coded) else first_nonfinite(ship)
