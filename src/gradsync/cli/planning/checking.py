"""A run that was saved, against what was predicted for it: how far off, in which part, and the numbers put right.

FOLDER/cluster.toml   the links that the prediction was made with
FOLDER/profile.toml   the model's step
FOLDER/plan.toml      what ran
FOLDER/rank-N.jsonl   a header, then a line per step: {"step": 7, "step_s": 0.035, "exposed_s": 0.004}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gradsync.cli.planning.question import load
from gradsync.cli.planning.thresholds import least
from gradsync.cli.planning.what_if import with_faster_link, with_slower_compute
from gradsync.links import Cluster
from gradsync.paces import Delayed, EveryStep
from gradsync.plan import Plan
from gradsync.planner.predicting import predict
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.snippet import as_python

_FASTEST = 64.0  # a link that must be off by more than this is not what is wrong
_ENOUGH = 3  # steps
_FORMAT = 1  # of the steps' files, as engine.diary writes them


@dataclass(frozen=True)
class Run:
    """What a folder holds; times are means over ranks of the middle of their steps."""

    cluster: Cluster
    profile: ModelProfile
    plan: Plan
    steps: int
    step_s: float
    exposed_s: float


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

    run: Run
    predicted: Prediction
    cluster: Cluster
    profile: ModelProfile
    refitted: Prediction
    compute_factor: float
    link_factor: float | None

    @property
    def error(self) -> float:
        """Of the predicted step, relative to the measured one."""
        return self.predicted.step_s / self.run.step_s - 1

    @property
    def culprit(self) -> str:
        """The part that is further off, in seconds."""
        compute = abs(self.predicted.compute_s - (self.run.step_s - self.run.exposed_s))
        return "compute" if compute > abs(self.predicted.exposed_s - self.run.exposed_s) else "exposed"


def read_run(folder: Path) -> Run:
    """Everything in the folder; a sentence if it is no run."""
    plan = load("--check", folder / "plan.toml", Plan.load)
    seldom = not isinstance(
        plan.pace, EveryStep | Delayed
    )  # steps differ on purpose: a median would forget the dear ones
    ranks = [load("--check", path, _read_steps) for path in sorted(folder.glob("rank-*.jsonl"))]
    if not ranks:
        raise ValueError(
            f"{folder} holds no rank-0.jsonl: a run is saved by gs.attach(model, optimizer, gs.auto(save=folder))"
        )
    middle = fmean if seldom else median
    return Run(
        load("--check", folder / "cluster.toml", Cluster.load),
        load("--check", folder / "profile.toml", ModelProfile.load),
        plan,
        min(len(steps) for steps in ranks),
        fmean(middle([step for step, _ in steps]) for steps in ranks),
        fmean(middle([exposed for _, exposed in steps]) for steps in ranks),
    )


def check(run: Run) -> Check:
    """Compare, then scale computation and the links until the prediction meets the measurement."""
    predicted = predict(run.profile, run.cluster, run.plan)
    compute_factor = max(1e-9, run.step_s - run.exposed_s) / run.profile.compute_s
    profile = with_slower_compute(run.profile, compute_factor)

    def fast_enough(factor: float) -> bool:
        return predict(profile, with_faster_link(run.cluster, factor), run.plan).exposed_s <= run.exposed_s

    def slow_enough(factor: float) -> bool:
        return predict(with_slower_compute(run.profile, factor), run.cluster, run.plan).step_s >= run.step_s

    link_factor = least(fast_enough, 1 / _FASTEST, _FASTEST)
    cluster = run.cluster
    if link_factor is not None:
        cluster = with_faster_link(cluster, link_factor)
    elif (factor := least(slow_enough, 1 / _FASTEST, _FASTEST)) is not None:
        compute_factor, profile = factor, with_slower_compute(run.profile, factor)
    cluster = replace(cluster, name=f"{run.cluster.name} (refitted)".strip())
    return Check(run, predicted, cluster, profile, predict(profile, cluster, run.plan), compute_factor, link_factor)


def sentences(checked: Check, now: Prediction) -> list[str]:
    """What came of it, and what the plan would be with the numbers put right."""
    run, predicted = checked.run, checked.predicted
    inside = predicted.low_s <= run.step_s <= predicted.high_s
    told = [
        f"{run.steps} steps took {_ms(run.step_s)} each, {_ms(predicted.step_s)} were predicted: "
        f"{100 * checked.error:+.1f} %, {'inside' if inside else 'outside'} the interval of "
        f"{_ms(predicted.low_s)} to {_ms(predicted.high_s)}.",
        f"Computation: {_ms(run.step_s - run.exposed_s)} measured, {_ms(predicted.compute_s)} predicted. "
        f"Exposed: {_ms(run.exposed_s)} measured, {_ms(predicted.exposed_s)} predicted. "
        f"Further off is {'computation' if checked.culprit == 'compute' else 'what is exposed'}.",
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
    """See docs/planning.md."""
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
    return {name: getattr(prediction, name) for name in names}


def _read_steps(path: Path) -> Sequence[tuple[float, float]]:
    """Seconds of each step and what of it was exposed; the last line may be cut off, as the run may have been."""
    lines = path.read_text(encoding="utf-8").splitlines()
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines) and number > 1:
                break
            raise ValueError(f"{path}: line {number} is not JSON: {line[:40]!r}") from None
        if number == 1:
            if not isinstance(row, dict) or row.get("format") != _FORMAT:
                raise ValueError(f'{path}: the first line must say "format": {_FORMAT}, got {line[:60]!r}')
        elif not isinstance(row, dict) or not _is_time(row.get("step_s")) or not _is_time(row.get("exposed_s")):
            raise ValueError(f"{path}: line {number} needs step_s and exposed_s, in seconds, got {line[:60]!r}")
        else:
            steps.append((float(row["step_s"]), float(row["exposed_s"])))
    if len(steps) < _ENOUGH:
        raise ValueError(f"{path} holds {len(steps)} steps: at least {_ENOUGH} are needed")
    return steps


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
