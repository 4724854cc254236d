"""The predicted cost of a plan, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gradsync.plan.sync_plan import Plan

Quality = Literal["exact", "16-bit", "lossy", "other training"]


class StepSpan(NamedTuple):
    """Something that takes from `start_s` to `stop_s` of a step."""

    track: Literal["compute", "codec", "wire"]
    label: str  # "forward", "backward", "optimizer", "bucket 3", "header" ...
    start_s: float
    stop_s: float
    exposed: bool = False  # computation waited meanwhile


@dataclass(frozen=True)
class Prediction:
    """One candidate, priced.

    Args:
        plan: What to attach.
        step_s: Seconds per training step (per micro-batch with `accumulate(k)`), the mean over one period of the pace.
        low_s: With nine in ten, a step takes at least so long,
        high_s: and at most so long.
        compute_s: A step without synchronization.
        exposed_s: By what a step is longer than that: waiting, contention, stragglers.
        nbytes: What one rank sends to others per step, inside its host and across.
        memory_nbytes: What buckets, residuals and other copies take on each rank.
        quality: "exact"; "16-bit"; "lossy": compressed; "other training": the pace changes what is learned.
        reason: One sentence.
        timeline: One step (of the period's synchronizing ones), for drawing.
        unsure_s: By so much the mean may be off, with nine in ten: the spread of the links and what the model leaves
            out. Without jitter, which evens out, and meets every plan alike.
    """

    plan: Plan
    step_s: float
    low_s: float
    high_s: float
    compute_s: float
    exposed_s: float
    nbytes: int
    memory_nbytes: int
    quality: Quality
    reason: str = ""
    timeline: tuple[StepSpan, ...] = ()
    unsure_s: float = 0.0

    @property
    def overhead(self) -> float:
        """The share of the step that synchronization takes.

        Negative never: a step is at least as long as its computation.
        """
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0
