"""DiLoCo: every rank takes k inner steps by itself; what they changed is a gradient for an outer optimizer.

For each fragment, with p a rank's own parameters, w the global ones, b their momentum, n ranks, and t the inner steps
so far; fragment f of F departs whenever t mod k = (f + 1)·k/F mod k.

    depart, after inner step t          Δ = Σ ((w − p) / n)          compressed, if the plan says so
    merge, after inner step t + delay   b ← momentum·b + Δ
                                        w ← w − lr·(Δ + momentum·b)
                                        p ← mixing·p + (1 − mixing)·w      with the p of then; mixing = 0: p ← w

    k = 4, fragments = 2, delay = 1

    inner step    1    2    3    4    5    6    7    8
    fragment 0         ├───▶│              ├───▶│
    fragment 1                   ├───▶│              ├───▶      departs ├, travels beside the next step, is merged ▶│

What is merged in a step was sent before what departs in it. With mixing = 0 the steps that a rank took while its
fragment travelled are lost; with mixing = 1 it never hears of the others before `drain()`.

`drain()` brings everything to an end: what is under way is merged, fragments of which inner steps are not yet in w
are sent and merged too, and then p ← w whatever the mixing is. Training may go on after it.

Only what required a gradient at attach travels (see `trained`). Rank 0's buffers go to all with every departure, and
all ranks wait for them; a model without buffers waits for nothing before the merge.
"""

from __future__ import annotations

import contextlib

import torch

from gradsync.agreement.calls import Call, meet
from gradsync.errors import Disagreement, GradSyncError
from gradsync.pace.after_step import AfterStep
from gradsync.pace.contract import SavedPace, Site, Stats
from gradsync.pace.fragments import Fragment, cut
from gradsync.plan.paces import DiLoCo


class DiLoCoPace(AfterStep):
    """`diloco(k)` at work."""

    def __init__(self, pace: DiLoCo, site: Site) -> None:
        """Every rank makes it at once, with equal parameters."""
        self._pace = pace
        super().__init__(site)
        named = self._trained.named
        parts = [part for part in cut([param.nbytes for _, param in named], pace.fragments) if part]
        self._fragments = [Fragment(site, named[part.start : part.stop], pace.outer) for part in parts]
        self._num_exchanges = 0

    @property
    def replicas_equal(self) -> bool:
        alone = self._site.lane.groups.size == 1
        return alone or all(fragment.equal_at == self._clock for fragment in self._fragments)

    def _is_time(self) -> bool:
        return bool(self._arriving() or self._departing())

    def _arriving(self) -> list[Fragment]:
        """What is to be merged now, in the order in which it departed."""
        latest = self._clock - self._pace.delay
        arriving = [each for each in self._fragments if each.departed_at is not None and each.departed_at <= latest]
        return sorted(arriving, key=lambda each: each.departed_at or 0)

    def _departing(self) -> list[Fragment]:
        k, apart = self._pace.k, self._pace.k // self._pace.fragments
        return [each for f, each in enumerate(self._fragments) if self._clock % k == (f + 1) * apart % k]

    def _act(self) -> None:
        """Do what is due."""
        self._due.clear()
        for fragment in self._arriving():
            fragment.merge(self._clock, self._pace.mixing)
        for fragment in self._departing():
            self._depart(fragment)
            if not self._pace.delay:
                fragment.merge(self._clock, self._pace.mixing)

    def _depart(self, fragment: Fragment) -> None:
        fragment.depart(self._clock)
        self._num_exchanges += 1

    def drain(self) -> bool:
        self._meet()
        self._due.clear()
        under_way = [fragment for fragment in self._fragments if fragment.departed_at is not None]
        for fragment in sorted(under_way, key=lambda each: each.departed_at or 0):
            fragment.merge(self._clock, self._pace.mixing)
        for fragment in self._fragments:
            if fragment.synchronized_at != self._clock:
                self._depart(fragment)
                fragment.merge(self._clock, mixing=0)
            elif fragment.equal_at != self._clock:
                fragment.return_to_global(self._clock)
        return False

    def _meet(self) -> None:
        """Before fragments travel in another order than the clock's: in different calls their sizes would differ."""
        lane = self._site.lane
        heads = meet(lane, Call.DRAIN, self._site.num_marks, self._clock.to_bytes(8, "little"))
        clocks = [int.from_bytes(head.digest, "little") for head in heads]
        if len(set(clocks)) > 1:
            raise Disagreement(
                f"{lane.place()} drain() was called after {clocks} backward calls of ranks {list(lane.groups.ranks)}: "
                "call backward and drain() equally often on every rank"
            )

    def describe(self, bucket: int) -> str:
        found = (fragment.flat_set.describe(bucket) for fragment in self._fragments)
        return next((text for text in found if text is not None), super().describe(bucket))

    def stats(self) -> Stats:
        return {"inner_steps": self._clock, "num_exchanges": self._num_exchanges}

    def settle(self) -> None:
        for fragment in self._fragments:
            fragment.land()

    def state(self) -> SavedPace:
        shared = {
            "diloco.clock": torch.tensor(self._clock, device="cpu"),
            "diloco.due": torch.tensor(int(bool(self._due)), device="cpu"),
        }
        # One row for each fragment that the plan asks for: the numbers of those that the model has not stay 0.
        rows = torch.zeros(self._pace.fragments, 3, dtype=torch.int64, device="cpu")
        for row, each in zip(rows, self._fragments, strict=False):
            departed_at = -1 if each.departed_at is None else each.departed_at
            row.copy_(torch.tensor([departed_at, each.synchronized_at, each.equal_at], device="cpu"))
            shared |= {f"diloco.{key}": tensor for key, tensor in each.state(self._pace.delay > 0).items()}
        return SavedPace(shared | {"diloco.fragments": rows}, {})

    def load(self, saved: SavedPace) -> None:
        self._due.clear()
        for fragment in self._fragments:
            fragment.forget()
            fragment.flat_set.register()
        ours = {key: tensor for key, tensor in saved.shared.items() if key.startswith("diloco.")}
        state = {key.removeprefix("diloco."): tensor for key, tensor in ours.items()}
        if not all(f"global.{name}" in state for fragment in self._fragments for name in fragment.flat_set.names):
            self._trained.warn_of_another("diloco", saved.shared)
            self._trained.level()
            self.reset()
            return
        self._clock = int(state["clock"])
        rows: list[list[int]] = state["fragments"].tolist()
        same = len(rows) == self._pace.fragments
        for f, fragment in enumerate(self._fragments):
            # Of other fragments nothing can be under way: what was will depart again.
            fragment.load(state, *(rows[f] if same else (-1, -1, -1)))
        if int(state["due"]):
            self._due.set()

    def reset(self) -> None:
        self._due.clear()
        for fragment in self._fragments:
            fragment.reset(self._clock)

    def close(self, together: bool) -> None:
        if together:
            with contextlib.suppress(GradSyncError):
                self.settle()
