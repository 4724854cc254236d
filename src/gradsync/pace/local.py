"""Local SGD: every rank steps by itself, and now and then the parameters are averaged.

    rank 0    step step step step ┐        step step step step ┐
    rank 1    step step step step ┴ mean   step step step step ┴ mean
              └──── k ──────────┘

Without a compressor parameters travel as they are. With one, what changed since the last mean does: a code of few
bits would spoil parameters, but not their changes, and what it loses comes with the next change.

    exact         p ← Σ (p / n)
    compressed    p ← w − Σ ((w − p) / n), and the same becomes w
    one rank      p stays as it is

Only what required a gradient at attach travels (see `trained`), and rank 0's buffers with it. The first average comes
after step 1 if there is a warmup, after step k otherwise.
"""

from __future__ import annotations

import torch

from gradsync.exchange.fleet import Cargo, Fleet
from gradsync.pace.after_step import AfterStep
from gradsync.pace.contract import Saved, Site, Stats
from gradsync.pace.optimizer_state import average_optimizers
from gradsync.pace.passage import arrive, depart
from gradsync.paces import LocalSGD


class Local(AfterStep):
    """`local_sgd(k)` at work."""

    def __init__(self, pace: LocalSGD, site: Site, compressed: bool) -> None:
        """Every rank makes it at once, with equal parameters."""
        self._pace = pace
        super().__init__(site)
        self._size = site.lane.groups.size
        self._params = self._trained.params
        cargo = [Cargo(name, param.detach()) for name, param in self._trained.named]
        self._fleet = Fleet(cargo, site.exact, site.shipping, site.indices, site.bucket_bytes)
        self._anchor = [param.detach().clone() for param in self._params] if compressed else None
        self._last = 0  # its value at the last average
        self._num_averages = 0

    @property
    def replicas_equal(self) -> bool:
        return self._size == 1 or self._clock == self._last

    def _is_time(self) -> bool:
        return self._clock <= self._pace.warmup or (self._clock - self._pace.warmup) % self._pace.k == 0

    def drain(self) -> bool:
        if self._clock != self._last:
            self._act()
        return False

    def _act(self) -> None:
        self._due.clear()
        if self._size > 1:
            self._exchange()
            if self._pace.optimizer_state:
                average_optimizers(self._site)
        else:
            self._anchor_here()
        self._last = self._clock
        self._num_averages += 1

    @torch.no_grad()
    def _exchange(self) -> None:
        ship = self._fleet.ships[0]
        for i, (view, param) in enumerate(zip(ship.views, self._params, strict=True)):
            if self._anchor is None:
                torch.div(param, self._size, out=view)
            else:
                torch.sub(self._anchor[i], param, out=view).div_(self._size)
        passage = depart(self._site, self._fleet, ship, with_buffers=True, clock=self._clock)
        arrive(self._site, self._fleet, passage, with_buffers=True)
        for i, (view, param) in enumerate(zip(ship.views, self._params, strict=True)):
            if self._anchor is None:
                param.copy_(view)
            else:
                param.copy_(self._anchor[i].sub_(view))

    def describe(self, bucket: int) -> str:
        return self._fleet.describe(bucket) or super().describe(bucket)

    def stats(self) -> Stats:
        return {"local_steps": self._clock - self._last, "num_averages": self._num_averages}

    def state(self) -> Saved:
        numbers = {"clock": self._clock, "last": self._last, "due": int(bool(self._due))}
        shared = {f"local_sgd.{key}": torch.tensor(number, device="cpu") for key, number in numbers.items()}
        if self._anchor is not None:
            names = self._fleet.names
            shared |= {f"local_sgd.anchor.{name}": w.clone() for name, w in zip(names, self._anchor, strict=True)}
        return Saved(shared, {})

    def load(self, saved: Saved) -> None:
        self._fleet.enlist()
        self._due.clear()
        shared = saved.shared
        if "local_sgd.clock" not in shared:
            self._trained.warn_of_another("local_sgd", shared)
            self._begin_alike()
            return
        self._clock, self._last = (int(shared[f"local_sgd.{key}"]) for key in ("clock", "last"))
        anchors = [f"local_sgd.anchor.{name}" for name in self._fleet.names]
        if self._anchor is not None and not all(key in shared for key in anchors):
            self._begin_alike()  # nothing was compressed when it was saved
            return
        for w, key in zip(self._anchor or [], anchors, strict=False):
            w.copy_(shared[key])
        if int(shared["local_sgd.due"]):
            self._due.set()

    def _begin_alike(self) -> None:
        """From the mean of what the ranks have loaded."""
        self._trained.level()
        self.reset()

    def reset(self) -> None:
        self._last = self._clock
        self._due.clear()
        self._anchor_here()

    def _anchor_here(self) -> None:
        for w, param in zip(self._anchor or [], self._params, strict=False):
            w.copy_(param.detach())
