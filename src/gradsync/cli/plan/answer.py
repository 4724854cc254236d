"""The answer of the predictions: the plan to use, and whether anything is to be gained by it."""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.algorithms.builtin import native
from gradsync.cluster import Cluster
from gradsync.plan.sync_plan import Plan
from gradsync.planner.candidates import Allow
from gradsync.planner.predict import predict
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.recommend import SAME, pick, recommend

SMALL = 0.05  # an overhead that nobody needs to act on
_SAME = ("exact", "16-bit")


@dataclass(frozen=True)
class Answer:
    """The question, every candidate, and those that matter.

    Args:
        cluster: What was asked about,
        profile: and what is to be trained on it.
        candidates: Best first; unless the user allowed more, what trains the same stands before all else.
        usual: `Plan()`: exact averaging, overlapped with backward, the fastest algorithm that gradsync has there.
        ddp: What stock DDP costs there: the same by the process group's own all-reduce, without gradsync's part.
        chosen: The plan to use.
        arrives: What `bandwidth` of the narrow link is of the rate by which people name it: "100g" is a line rate of
            12.5 GB/s, of which 11 arrive. 1: it is named by what arrives.
        dtype_assumed: True: nobody said of which type the gradients are.
        allow: What the user lets it choose from; None: nothing was said.
    """

    cluster: Cluster
    profile: ModelProfile
    candidates: tuple[Prediction, ...]
    usual: Prediction
    ddp: Prediction
    chosen: Prediction
    arrives: float = 1.0
    dtype_assumed: bool = False
    allow: Allow | None = None

    @property
    def same(self) -> tuple[Prediction, ...]:
        """The candidates that train what DDP trains, up to rounding."""
        return tuple(it for it in self.candidates if trains_the_same(it))

    @property
    def lossy(self) -> tuple[Prediction, ...]:
        """The candidates that lose something of each gradient, but take every step."""
        return tuple(it for it in self.candidates if it.quality == "lossy")

    @property
    def other(self) -> tuple[Prediction, ...]:
        """The candidates whose pace changes what is learned, or from how large a batch."""
        return tuple(it for it in self.candidates if it.quality == "other training")

    @property
    def needed(self) -> bool:
        """True if there is something to gain over DDP without changing what is learned, or something to look for."""
        gain = saving(pick(self.same), self.ddp)
        return gain > SAME or (self.ddp.overhead > SMALL and gain >= -SAME)

    @property
    def slower(self) -> bool:
        """True if the chosen plan costs noticeably more than stock DDP."""
        return saving(self.chosen, self.ddp) < -SAME


def answer(
    profile: ModelProfile,
    cluster: Cluster,
    allow: Allow | None = None,
    arrives: float = 1.0,
    dtype_assumed: bool = False,
) -> Answer:
    """Choose: among all that the user allows; if nothing was said, among what trains the same, with the rest behind."""
    found = recommend(profile, cluster, allow or "all")
    if allow is None:
        chosen = pick([it for it in found if trains_the_same(it)])
        found.sort(key=lambda it: (it is not chosen, not trains_the_same(it), it.exposed_s))
    usual = next(it for it in found if it.plan == Plan())
    ddp = predict(profile, cluster, Plan(algorithm=native()), stock=True)
    return Answer(cluster, profile, tuple(found), usual, ddp, found[0], arrives, dtype_assumed, allow)


def trains_the_same(prediction: Prediction) -> bool:
    """Return whether a run learns what exact averaging in every step learns, up to 16-bit rounding."""
    return prediction.quality in _SAME


def saving(one: Prediction, other: Prediction) -> float:
    """The share of the other's step by which synchronization costs less; negative if it costs more.

    By what is exposed: with `accumulate(k)` a step is shorter also because the optimizer steps less often.
    """
    return (other.exposed_s - one.exposed_s) / other.step_s if other.step_s > 0 else 0.0
