"""`gs.auto()` at work: profile, choose, switch, and look after the prediction.

    synchronization   1    2 … 6      7 …                 206        207 … 212    213 …
    plan              exact, no overlap │ the chosen one            │ as at first │ chosen anew
                      warm  timed       │            compared with  │
                      up                │ border     the prediction ┘ it was off by more than 25 %

The clock is the count of synchronizations, which all ranks share: whoever is slow, all switch at the same one. What is
due is done at the next border: before the next forward, or before anything else that ranks do together.

From one plan to another between two steps: a new engine under the same GradSync, the old one closed.

    synchronization 7 │ step │ border: open ─ carry over ─ install ─ close │ forward │ synchronization 8
    old engine        ───────────────────────────────────────────────┤
    new engine                         ├────────────────────────────────────────────────────────────────

The new one is opened first: if it cannot be, the old one goes on. For a moment both have buckets, but that is before
forward, when nothing else of a step is in memory.
"""

from __future__ import annotations

import math
import struct
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

import torch

from gradsync.agreement.calls import Call
from gradsync.agreement.documents import share
from gradsync.autotune import saved_choice
from gradsync.autotune.decide import Decision, decide, describe_miss, gather, is_off, probe_links
from gradsync.autotune.profiling import Timing, devices_of
from gradsync.autotune.saved_choice import SavedChoice
from gradsync.autotune.stopwatch import Stopwatch, clock_for
from gradsync.engine.assemble import Builder
from gradsync.engine.listeners import moments_of
from gradsync.engine.loop import StepLoop
from gradsync.engine.several_models import chooses
from gradsync.errors import Disagreement, listed, say
from gradsync.plan.auto import PROFILING, Auto
from gradsync.plan.sync_plan import Plan
from gradsync.trace.lines import PlanChoice


def switch(steps: StepLoop, builder: Builder, plan: Plan) -> None:
    """Run with `plan` from now on; every rank calls this at once, at a border.

    Raises ValueError on all of them if the plan does not fit here; then nothing has changed.
    """
    if plan == steps.plan:
        return
    opened = builder.open(plan)
    old, old_pace = steps.synchronization, steps.pace
    for entry in old.entries:
        entry.leave()
    engine = builder.build(plan, opened)
    engine.synchronization.continue_from(old)
    engine.recorder.continue_from(steps.recorder)
    steps.install(engine)
    # All ranks have met in the new lane, so nobody reads from the old one any more; but a stream may be behind.
    if any(not channel.on_host for channel in old.lane.groups.data.values()):
        torch.cuda.synchronize()
    old_pace.close(together=True)
    old.lane.close(together=True)


_NEVER = sys.maxsize
_WORD = struct.Struct("<d")


class Controller:
    """The listener of a GradSync that chooses its plan; see `Listeners`."""

    def __init__(self, auto: Auto, steps: StepLoop, builder: Builder, name: str) -> None:
        """Every rank calls this at once, with nothing under way."""
        self.predicted_s: float | None = None
        self._auto = auto
        self._steps = steps
        self._builder = builder
        self._name = name
        self._entries = steps.synchronization.entries
        self._cluster = auto.cluster or probe_links(steps.lane, builder.parent)
        self._waited_s: float | None = None  # what a synchronization took when the plan was chosen last
        self._misses = 0  # in a row
        self._due = _NEVER  # the count of synchronizations at which all ranks meet
        self._chosen_at = 0
        self._stopwatch: Stopwatch | None = None  # while profiling
        self._warm = False
        self._phase: Literal["profiling", "running", "settled"] = "profiling"
        me = weakref.ref(self)
        steps.chooses(lambda: (controller := me()) is not None and controller.is_due)
        chooses(steps)
        self._profile()
        if self._cluster is None:  # on every rank
            self._adopt(Decision(Plan(), None, None))

    @property
    def link_bandwidth(self) -> float | None:
        """Bytes per second between two hosts, as the probe measured it; None on one host."""
        return self._cluster.across.bandwidth if self._cluster is not None and len(self._cluster.hosts) > 1 else None

    @property
    def _step(self) -> int:
        return self._steps.lane.step

    # As a listener: see `moments_of`

    @property
    def is_due(self) -> bool:
        """True if there is something to do at the next border."""
        return self._step >= self._due

    def border(self) -> None:
        if not self.is_due:
            return
        self._due = _NEVER
        if self._phase == "profiling":
            self._choose()
        else:
            self._check()

    def synchronized(self, counts: bool) -> None:
        if self._stopwatch is not None:
            self._stopwatch.lap(counts and self._warm, waited=True)
            self._warm = True

    # The phases

    def _profile(self) -> None:
        """Time the steps that come; the first one warms up."""
        self._phase, self.predicted_s = "profiling", None
        self._time_by(Stopwatch(clock_for(devices_of(self._entries))))
        self._warm = False
        self._due = self._step + 1 + self._auto.steps

    def _time_by(self, stopwatch: Stopwatch | None) -> None:
        """Have it hear of the steps from now on, in place of the one before."""
        if self._stopwatch is not None:
            self._steps.listeners.remove(**moments_of(self._stopwatch))
        self._stopwatch = stopwatch
        if stopwatch is not None:
            self._steps.listeners.add(first=True, **moments_of(stopwatch))

    def _choose(self) -> None:
        self._steps.meet(Call.PLAN)
        assert self._stopwatch is not None
        lane = self._steps.lane
        with self._steps.failing():
            timings = gather(lane, self._stopwatch, self._auto.steps, self._entries)
            if not timings:  # every step was dropped
                self._profile()
                return
            self._probe_if_changed(timings)
            decision = decide(lane, timings, self._entries, self._cluster, self._auto.allow, self._name)
            self._adopt(decision)

    def _probe_if_changed(self, timings: Sequence[Timing]) -> None:
        """Probe anew if synchronizations take another time than after the last probe."""
        if self._auto.cluster is not None:
            return
        # Who comes last waits for nobody: the shortest wait is communication alone.
        waited_s = min(timing.waited_s for timing in timings)
        before_s, self._waited_s = self._waited_s, waited_s
        if self._cluster is None or (before_s is not None and is_off(waited_s, before_s)):
            self._cluster = probe_links(self._steps.lane, self._builder.parent)

    def _adopt(self, decision: Decision, anew: bool = True) -> None:
        """Run with this plan, and look after its prediction; not `anew`: it was chosen in an earlier run."""
        plan, predicted_s, inputs = decision
        self._time_by(None)
        try:
            switch(self._steps, self._builder, plan)
        except ValueError as error:  # on every rank: it does not fit here
            if self._steps.lane.groups.rank == 0:
                warnings.warn(
                    f"gs.auto() chose a plan that cannot run here, so it uses the default: {error}", stacklevel=2
                )
            predicted_s = None
            switch(self._steps, self._builder, Plan())
        self.predicted_s = predicted_s
        if predicted_s is None:
            self._phase, self._due = "settled", _NEVER
            return
        self._run()
        if inputs is not None and self._auto.save is not None and anew:
            inputs.save(self._auto.save, plan)
        if self._steps.tracing is not None:
            choice = PlanChoice(self._step, plan.canonical(), predicted_s, self.link_bandwidth)
            self._steps.tracing.tracer.write(choice)

    def _run(self) -> None:
        # A miss right after another: each time only after twice as long, so that it never swings to and fro.
        interval = self._auto.recheck_every << min(max(0, self._misses - 1), 32)
        self._phase, self._chosen_at, self._due = "running", self._step, self._step + interval

    def _check(self) -> None:
        """Compare the measured step with the predicted one, the same numbers on every rank."""
        assert self.predicted_s is not None
        records = self._steps.recorder.records()
        times = [record.step_s for record in records if record.step > self._chosen_at]
        heads = self._steps.meet(Call.PLAN, _WORD.pack(median(times) if times else math.nan))
        medians = [value for head in heads if not math.isnan(value := _WORD.unpack(head.digest)[0])]
        measured_s = median(medians) if medians else self.predicted_s
        if not is_off(measured_s, self.predicted_s):
            self._misses = 0
            self._run()
            return
        self._misses += 1
        if self._steps.lane.groups.rank == 0:
            say(describe_miss(measured_s, self.predicted_s, self._step, self._auto.steps))
        with self._steps.failing():
            switch(self._steps, self._builder, PROFILING)
        self._profile()

    # Checkpoints

    def state(self) -> dict[str, torch.Tensor]:
        """The plan that was chosen."""
        if self.predicted_s is None:
            return saved_choice.flatten(None)
        plan = self._steps.plan.canonical()
        return saved_choice.flatten(SavedChoice(plan, self.predicted_s, self._steps.lane.groups.size, self._auto.allow))

    def take_plan(self, state: Mapping[str, torch.Tensor]) -> None:
        """Run with the plan that this state was saved with, if it was chosen for as many ranks from as much.

        Every rank calls this at once; that one of them brings the state is enough.
        """
        self._steps.meet(Call.LOAD)
        mine, refusal = None, None
        try:
            mine = saved_choice.read(state)
        except ValueError as error:
            refusal = error
        lane = self._steps.lane
        with self._steps.failing():
            documents = share(lane, {"chosen": mine, "refusal": None if refusal is None else str(refusal)})
        if refusal is not None:
            raise refusal
        for rank, document in enumerate(documents):
            if document["refusal"] is not None:
                who = listed(lane.global_ranks([rank]))
                raise Disagreement(f"{lane.place()} {who} cannot load its state: {document['refusal']}")
        found = next(
            (SavedChoice(*document["chosen"]) for document in documents if document["chosen"] is not None), None
        )
        if found is not None and (found.ranks, found.allow) == (lane.groups.size, self._auto.allow):
            with self._steps.failing():
                self._adopt(Decision(Plan.from_canonical(found.plan), found.predicted_s, None), anew=False)

    def follow_step(self) -> None:
        """A state was loaded, and the count of synchronizations with it: what is due follows."""
        if self._phase == "profiling":
            self._profile()
        elif self._phase == "running":
            self._run()
