"""A run that was saved, against what was predicted for it: how far off, in which part, and the numbers put right."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from gradsync.cli.plan.saved_run import SavedRun
from gradsync.cli.plan.thresholds import least
from gradsync.cli.plan.what_if import with_faster_link, with_slower_compute
from gradsync.cluster import Cluster
from gradsync.plan.pace_recipe import exchange_of
from gradsync.planner.predict import predict
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.snippet import as_python

_FASTEST = 64.0  # a link that must be off by more than this is not what is wrong
_TURNS = 3  # of putting computation and the links right


@dataclass(frozen=True)
class Check:
    """A prediction beside what happened.

    Args:
        run: What happened.
        predicted: What the saved cluster and profile say of the saved plan.
        cluster: With the links put right.
        profile: With the computation put right.
        refitted: What these say.
        compute_factor: How many times as long computation took.
        link_factor: How many times as fast the links must have been; None: no speed of them explains the wait.
    """

    run: SavedRun
    predicted: Prediction
    cluster: Cluster
    profile: ModelProfile
    refitted: Prediction
    compute_factor: float
    link_factor: float | None

    @property
    def error(self) -> float:
        """The error of the predicted step, relative to the measured one."""
        return self.predicted.step_s / self.run.step_s - 1

    @property
    def culprit(self) -> str:
        """The part that is further off, in seconds."""
        computing_s, waiting_s = split(self.predicted)
        compute = abs(computing_s - (self.run.step_s - self.run.exposed_s))
        return "compute" if compute > abs(waiting_s - self.run.exposed_s) else "exposed"


def split(prediction: Prediction) -> tuple[float, float]:
    """Seconds in which a step computes and in which it only waits, as a run's recorder tells them apart.

    What hooks, copies and contention add to computation is computation there. Only `exposed_s` counts it as a cost.
    """
    if not exchange_of(prediction.plan.pace).steps_alike:
        return prediction.compute_s, prediction.exposed_s  # the timeline is not that of a mean step
    computing_s = sum(span.stop_s - span.start_s for span in prediction.timeline if span.track == "compute")
    return computing_s, max(0.0, prediction.step_s - computing_s)


def check(run: SavedRun) -> Check:
    """Compare, then scale computation and the links until the prediction meets the measurement."""
    predicted = predict(run.profile, run.cluster, run.plan)
    profile, cluster, compute_factor = run.profile, run.cluster, 1.0
    link_factor: float | None = None
    computed_s = max(1e-9, run.step_s - run.exposed_s)

    def fast_enough(factor: float) -> bool:
        return split(predict(profile, with_faster_link(run.cluster, factor), run.plan))[1] <= run.exposed_s

    def slow_enough(factor: float) -> bool:
        return predict(with_slower_compute(run.profile, factor), run.cluster, run.plan).step_s >= run.step_s

    # In turns, for a slow link also slows computation down while it works.
    for _ in range(_TURNS):
        compute_factor *= computed_s / split(predict(profile, cluster, run.plan))[0]
        profile = with_slower_compute(run.profile, compute_factor)
        link_factor = least(fast_enough, 1 / _FASTEST, _FASTEST)
        cluster = run.cluster if link_factor is None else with_faster_link(run.cluster, link_factor)
    if link_factor is None and (factor := least(slow_enough, 1 / _FASTEST, _FASTEST)) is not None:
        compute_factor, profile = factor, with_slower_compute(run.profile, factor)
    cluster = replace(cluster, name=f"{run.cluster.name} (refitted)".strip())
    return Check(run, predicted, cluster, profile, predict(profile, cluster, run.plan), compute_factor, link_factor)


def sentences(checked: Check, now: Prediction) -> list[str]:
    """Say what came of the check, and what the plan would be with the numbers put right."""
    run, predicted = checked.run, checked.predicted
    inside = predicted.low_s <= run.step_s <= predicted.high_s
    computing_s, waiting_s = split(predicted)
    told = [
        f"{run.steps} steps took {_ms(run.step_s)} each, {_ms(predicted.step_s)} were predicted: "
        f"{100 * checked.error:+.1f} %, {'inside' if inside else 'outside'} the interval of "
        f"{_ms(predicted.low_s)} to {_ms(predicted.high_s)}.",
        f"Computation: {_ms(run.step_s - run.exposed_s)} measured, {_ms(computing_s)} predicted. "
        f"Waiting: {_ms(run.exposed_s)} measured, {_ms(waiting_s)} predicted. "
        f"Further off is {'computation' if checked.culprit == 'compute' else 'the wait'}.",
    ]
    links = "the links as they were, for no speed of theirs explains so little waiting"
    if checked.link_factor is not None:
        links = f"links × {checked.link_factor:.2f}"
    told.append(
        f"Refitted: computation × {checked.compute_factor:.2f}, {links}; that predicts {_ms(checked.refitted.step_s)}."
    )
    if now.plan == run.plan:
        return [*told, f"The plan would be the same now: {as_python(now.plan)}."]
    return [*told, f"The plan would be {as_python(now.plan)} now, with {_ms(now.step_s)} a step."]


def as_json(checked: Check, now: Prediction) -> dict[str, Any]:
    """The check for machines; docs/planning.md tells its fields."""
    return {
        "steps": checked.run.steps,
        "plan": checked.run.plan.canonical(),
        "measured": {"step_s": checked.run.step_s, "exposed_s": checked.run.exposed_s},
        "predicted": _part(checked.predicted),
        "error": checked.error,
        "culprit": checked.culprit,
        "refitted": {
            **_part(checked.refitted),
            "compute_factor": checked.compute_factor,
            "link_factor": checked.link_factor,
            "across": asdict(checked.cluster.across),
            "inside": asdict(checked.cluster.inside),
        },
        "plan_now": now.plan.canonical(),
    }


def _part(prediction: Prediction) -> dict[str, float]:
    names = ("step_s", "low_s", "high_s", "compute_s", "exposed_s")
    computing_s, waiting_s = split(prediction)
    return {name: getattr(prediction, name) for name in names} | {"computing_s": computing_s, "waiting_s": waiting_s}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
