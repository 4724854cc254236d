"""DiLoCo: every rank takes k inner steps by itself; what they changed is a gradient for an outer optimizer.

For each fragment, with p a rank's own parameters, w the global ones, b their momentum, n ranks, and t the inner steps
so far; fragment f of F is launched whenever t mod k = (f + 1)·k/F mod k.

    launch, after inner step t          Δ = Σ ((w − p) / n)          compressed, if the plan says so
    merge, after inner step t + delay   b ← momentum·b + Δ
                                        w ← w − lr·(Δ + momentum·b)
                                        p ← mixing·p + (1 − mixing)·w      with the p of then; mixing = 0: p ← w

    k = 4, fragments = 2, delay = 1

    inner step    1    2    3    4    5    6    7    8
    fragment 0         ├───▶│              ├───▶│
    fragment 1                   ├───▶│              ├───▶      launched ├, travels beside the next step, is merged ▶│

What is merged in a step was sent before what is launched in it. With mixing = 0 the steps that a rank took while its
fragment travelled are lost; with mixing = 1 it never hears of the others before `drain()`.

`drain()` brings everything to an end: what is under way is merged, fragments of which inner steps are not yet in w
are sent and merged too, and then p ← w whatever the mixing is. Training may go on after it.

Only what required a gradient at attach travels (see `trained_parameters`). Rank 0's buffers go to all with every
launch, and all ranks wait for them; a model without buffers waits for nothing before the merge.
"""

from __future__ import annotations

import contextlib

import torch

from gradsync.agreement.calls import Call, meet
from gradsync.errors import Disagreement, GradSyncError
from gradsync.pace.after_step import AfterStep
from gradsync.pace.contract import PaceContext, SavedPace, Stats, below, numbers_in_state
from gradsync.pace.fragments import Fragment, cut
from gradsync.plan.paces import DiLoCo


class DiLoCoPace(AfterStep):
    """`diloco(k)` at work."""

    def __init__(self, pace: DiLoCo, context: PaceContext) -> None:
        """Every rank makes it at once, with equal parameters."""
        self._pace = pace
        super().__init__(context)
        named = self._trained.named
        parts = [part for part in cut([param.nbytes for _, param in named], pace.fragments) if part]
        if pace.delay:
            context.lane.tell_several_at_once()  # headers are under way while ranks do something else, perhaps not all
        self._fragments = [Fragment(context, named[part.start : part.stop], pace.outer) for part in parts]
        self._num_exchanges = 0

    @property
    def replicas_equal(self) -> bool:
        alone = self._context.lane.groups.size == 1
        return alone or all(fragment.equal_at == self._clock for fragment in self._fragments)

    def _is_time(self) -> bool:
        return bool(self._to_merge() or self._to_launch())

    def _to_merge(self) -> list[Fragment]:
        """Return what is to be merged now, in the order in which it was launched."""
        latest = self._clock - self._pace.delay
        due = [each for each in self._fragments if each.launched_at is not None and each.launched_at <= latest]
        return sorted(due, key=lambda each: each.launched_at or 0)

    def _to_launch(self) -> list[Fragment]:
        k, spacing = self._pace.k, self._pace.k // self._pace.fragments
        return [each for f, each in enumerate(self._fragments) if self._clock % k == (f + 1) * spacing % k]

    def _act(self) -> None:
        """Do what is due."""
        for fragment in self._to_merge():
            fragment.merge(self._clock, self._pace.mixing)
        for fragment in self._to_launch():
            self._launch(fragment)
            if not self._pace.delay:
                fragment.merge(self._clock, self._pace.mixing)

    def _launch(self, fragment: Fragment) -> None:
        fragment.launch(self._clock)
        self._num_exchanges += 1

    def drain(self) -> bool:
        self._meet()
        self._due.clear()
        under_way = [fragment for fragment in self._fragments if fragment.launched_at is not None]
        for fragment in sorted(under_way, key=lambda each: each.launched_at or 0):
            fragment.merge(self._clock, self._pace.mixing)
        for fragment in self._fragments:
            if fragment.synchronized_at != self._clock:
                self._launch(fragment)
                fragment.merge(self._clock, mixing=0)
            elif fragment.equal_at != self._clock:
                fragment.return_to_global(self._clock)
        return False

    def _meet(self) -> None:
        """Meet before fragments travel in another order than the clock's: in other calls their sizes would differ."""
        lane = self._context.lane
        heads = meet(lane, Call.DRAIN, self._context.num_marks, self._clock.to_bytes(8, "little"))
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
            fragment.wait()

    def state(self) -> SavedPace:
        shared = numbers_in_state("diloco", clock=self._clock, due=int(bool(self._due)))
        # One row for each fragment that the plan asks for: the numbers of those that the model has not stay 0.
        rows = torch.zeros(self._pace.fragments, 3, dtype=torch.int64, device="cpu")
        for row, each in zip(rows, self._fragments, strict=False):
            launched_at = -1 if each.launched_at is None else each.launched_at
            row.copy_(torch.tensor([launched_at, each.synchronized_at, each.equal_at], device="cpu"))
            shared |= {f"diloco.{key}": tensor for key, tensor in each.state(self._pace.delay > 0).items()}
        return SavedPace(shared | {"diloco.fragments": rows}, {})

    def load(self, saved: SavedPace) -> None:
        self._due.clear()
        for fragment in self._fragments:
            fragment.discard()
            fragment.flat_set.register()
        state = below(saved.shared, "diloco.")
        if not all(f"global.{name}" in state for fragment in self._fragments for name in fragment.flat_set.names):
            self._trained.warn_of_another("diloco", saved.shared)
            self._trained.level()
            self.reset()
            return
        self._clock = int(state["clock"])
        rows: list[list[int]] = state["fragments"].tolist()
        same = len(rows) == self._pace.fragments
        for f, fragment in enumerate(self._fragments):
            # Of other fragments nothing can be under way: what was is launched again.
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
