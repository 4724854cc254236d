"""The choice of `gs.auto()`: the links are probed, the ranks' times become one profile, rank 0 chooses for all.

Neither a failed probe nor a failed choice ends the training: all ranks go on with the default plan, together. Rank 0
says in its log what was chosen and why, and keeps what it was chosen from for `gradsync plan --check`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from gradsync.agreement.documents import share
from gradsync.autotune.profiling import Timing, join, pack, unpack
from gradsync.autotune.stopwatch import Stopwatch
from gradsync.cluster import Cluster
from gradsync.engine.bucket import GradEntry
from gradsync.errors import listed, say
from gradsync.plan.auto import Allowed
from gradsync.plan.sync_plan import Plan
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.recommend import recommend
from gradsync.planner.snippet import in_words
from gradsync.probe.measure import measure
from gradsync.transport.lane import Lane
from gradsync.units import show_seconds

_TOLERANCE = 0.25  # by which a measured step may be off the predicted one


def describe_choice(chosen: Prediction, default: Prediction, step: int, calibrated: bool) -> str:
    """Say what was chosen, what it will take, why, and what the default would take."""
    share = f"{show_seconds(chosen.step_s)} a step predicted, {100 * chosen.overhead:.0f} % of it synchronization"
    figures = "measured here" if calibrated else "not measured here"
    if chosen.plan == Plan():
        return f"auto keeps the default plan from step {step} on: {share} (links {figures}); {chosen.reason}"
    return (
        f"auto chose {in_words(chosen.plan)} from step {step} on: {share} (links {figures}); {chosen.reason}. "
        f"The default plan would take {show_seconds(default.step_s)}"
    )


def describe_miss(measured_s: float, predicted_s: float, step: int, steps: int) -> str:
    """A sentence: the prediction did not hold, and what follows."""
    off, measured, predicted = 100 * (measured_s / predicted_s - 1), show_seconds(measured_s), show_seconds(predicted_s)
    return (
        f"auto measured {measured} a step at step {step} where {predicted} were predicted ({off:+.0f} %): "
        f"{steps} steps are profiled again, exactly, and a plan is chosen anew"
    )


def is_off(measured_s: float, expected_s: float) -> bool:
    """Return whether a time is another one than was expected.

    >>> is_off(1.2, 1.0), is_off(1.3, 1.0), is_off(0.7, 1.0)
    (False, True, True)
    """
    return abs(measured_s - expected_s) > _TOLERANCE * expected_s


class ChoiceInputs(NamedTuple):
    """The inputs that a plan was chosen from."""

    cluster: Cluster
    profile: ModelProfile

    def save(self, folder: Path, plan: Plan) -> None:
        """cluster.toml, profile.toml and plan.toml; a disk that fails ends no training."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.cluster.save(folder / "cluster.toml")
            self.profile.save(folder / "profile.toml")
            plan.save(folder / "plan.toml")
        except OSError as error:
            warnings.warn(
                f"gs.auto(save={str(folder)!r}) could not be written, and training goes on: {error}", stacklevel=2
            )


class Decision(NamedTuple):
    """The plan that all ranks run with from now on."""

    plan: Plan
    predicted_s: float | None  # None: nothing was chosen, and the plan is the default
    inputs: ChoiceInputs | None  # on rank 0


def probe_links(lane: Lane, parent: dist.ProcessGroup) -> Cluster | None:
    """Measure briefly what the links can do; None on every rank if any failed. Every rank calls this at once."""
    findings, failure = None, None
    try:
        findings = measure(parent, brief=True)
    except Exception as error:
        failure = _first_line(error)
    failures = [document["failure"] for document in share(lane, {"failure": failure})]
    failed = [rank for rank, each in enumerate(failures) if each is not None]
    if findings is not None and not failed:
        for sentence in findings.warnings if lane.groups.rank == 0 else ():
            say(sentence)
        return findings.cluster
    if lane.groups.rank == 0:
        warnings.warn(
            f"gs.auto() could not probe the links, so all ranks use the default plan: on "
            f"{listed(lane.global_ranks(failed))}, {failures[failed[0]]}",
            stacklevel=2,
        )
    return None


def gather(lane: Lane, stopwatch: Stopwatch, steps: int, entries: Sequence[GradEntry]) -> list[Timing]:
    """Return what the ranks measured, of those that did; every rank calls this at once."""
    mine = pack(Timing.of(stopwatch.samples()[-steps:], len(entries)), steps, len(entries))
    found = [unpack(row, steps) for row in lane.exchange(mine, "the times of a step")]
    return [timing for timing in found if timing is not None]


def decide(
    lane: Lane,
    timings: Sequence[Timing],
    entries: Sequence[GradEntry],
    cluster: Cluster | None,
    allow: Allowed,
    name: str,
) -> Decision:
    """Rank 0 chooses, says so, and tells the others; every rank calls this at once."""
    mine = Decision(Plan(), None, None)
    if lane.groups.rank == 0:
        try:
            assert cluster is not None
            mine = _choose(lane.step, ChoiceInputs(cluster, join(timings, entries, name)), allow)
        except Exception as error:
            warnings.warn(
                f"gs.auto() could not choose a plan, so all ranks use the default one: {_first_line(error)}",
                stacklevel=2,
            )
    words = {"plan": mine.plan.canonical(), "step_s": mine.predicted_s}
    first = share(lane, words)[0]
    return Decision(Plan.from_canonical(first["plan"]), first["step_s"], mine.inputs)


def _choose(step: int, inputs: ChoiceInputs, allow: Allowed) -> Decision:
    predictions = recommend(inputs.profile, inputs.cluster, allow=allow)
    best = predictions[0]
    default = next(each for each in predictions if each.plan == Plan())
    say(describe_choice(best, default, step, inputs.cluster.calibrated))
    return Decision(best.plan, best.step_s, inputs)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
