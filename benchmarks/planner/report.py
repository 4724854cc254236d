"""README: every cell, what was predicted, what was measured; and how good the choices were."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import bench_harness
from gradsync.cluster import Cluster
from gradsync.plan.sync_plan import Plan
from gradsync.planner.predict import predict
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.recommend import recommend
from planner.arms import ARMS, CONTROL, plan_of

_NORMAL = 1.4826  # standard deviations in a median absolute deviation
_BEGIN, _END = "<!-- measured -->", "<!-- end -->"


class Cell(NamedTuple):
    """One link, number of ranks, model and plan."""

    link: str
    ranks: int
    model: str
    arm: str
    predicted: Prediction
    measured_s: float
    apart: bool

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        return self.predicted.low_s <= self.measured_s <= self.predicted.high_s


class Choice(NamedTuple):
    """What the planner would have chosen among the plans measured."""

    link: str
    ranks: int
    model: str
    chosen: str
    best: str
    regret: float


def cells(results: dict[str, Any]) -> Iterator[Cell]:
    """All of them, predicted anew from what was probed and profiled then."""
    for name, facts in results.get("links", {}).items():
        link, ranks = _split(name)
        cluster = _load(Cluster, facts["cluster"])
        for model, found in facts["models"].items():
            profile = _profile(found)
            for arm in ARMS:
                if (plan := plan_of(arm, link)) is not None:
                    measured_s = median(found["samples_s"][arm.name])
                    yield Cell(link, ranks, model, arm.name, predict(profile, cluster, plan), measured_s, arm.apart)


def choices(results: dict[str, Any]) -> Iterator[Choice]:
    """Among plans that train the same, but for what compression does."""
    for name, facts in results.get("links", {}).items():
        link, ranks = _split(name)
        cluster = _load(Cluster, facts["cluster"])
        for model, found in facts["models"].items():
            plans = {plan: arm.name for arm in ARMS if not arm.apart and (plan := plan_of(arm, link)) is not None}
            ranked = recommend(_profile(found), cluster, plans=list(plans))
            chosen = next(plans[each.plan] for each in ranked if each.plan in plans)
            measured = {arm: median(found["samples_s"][arm]) for arm in plans.values()}
            best = min(measured, key=lambda arm: measured[arm])
            yield Choice(link, ranks, model, chosen, best, measured[chosen] / measured[best] - 1)


def drifts(results: dict[str, Any]) -> list[float]:
    """How much slower than profiled the machine computed while plans were measured, link by link and model by model."""
    return [
        median(found["samples_s"][CONTROL]) / predict(_profile(found), cluster, Plan()).compute_s - 1
        for facts in results.get("links", {}).values()
        for cluster in [_load(Cluster, facts["cluster"])]
        for found in facts["models"].values()
    ]


def write(path: Path, results: dict[str, Any]) -> None:
    """Put the tables between the marks."""
    text = path.read_text() if path.exists() else f"{_BEGIN}\n{_END}\n"
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    path.write_text(f"{before}{_BEGIN}\n\n{tables(results)}\n\n{_END}{after}")


def tables(results: dict[str, Any]) -> str:
    found = list(cells(results))
    picked = list(choices(results))
    parts = [_summary([c for c in found if not c.apart], "exact, bf16, int8 and powersgd")]
    parts.append(_summary([c for c in found if c.apart], "accumulate and diloco, apart"))
    regrets = [choice.regret for choice in picked]
    parts.append(
        f"Regret of the choice against the best measured plan, {len(picked)} choices: "
        f"median {100 * median(regrets):.1f} %, worst {100 * max(regrets):.1f} %."
    )
    drift = drifts(results)
    parts.append(
        f"Without synchronization a step took from {100 * min(drift):+.0f} to {100 * max(drift):+.0f} % of what was "
        f"profiled a minute before (median {100 * median(drift):+.0f} %): so much is the machine's own."
    )
    parts.append(bench_harness.table(*_cell_rows(found)))
    parts.append(bench_harness.table(*_choice_rows(picked)))
    return "\n\n".join(parts)


def _summary(found: list[Cell], title: str) -> str:
    errors = sorted(abs(cell.error) for cell in found)
    p90 = quantiles(errors, n=10)[-1]
    inside = sum(cell.inside for cell in found) / len(found)
    return (
        f"{title}: {len(found)} cells, error of the predicted step time median {100 * median(errors):.1f} %, "
        f"p90 {100 * p90:.1f} %, worst {100 * errors[-1]:.1f} %; {100 * inside:.0f} % inside the interval predicted."
    )


def _cell_rows(found: list[Cell]) -> tuple[list[str], list[list[str]]]:
    header = ["link", "ranks", "model", "plan", "predicted ms (interval)", "measured ms", "error"]
    rows = []
    for cell in found:
        p = cell.predicted
        interval = f"{1e3 * p.step_s:.1f} ({1e3 * p.low_s:.0f}–{1e3 * p.high_s:.0f})"
        row = [cell.link, str(cell.ranks), cell.model, cell.arm, interval, f"{1e3 * cell.measured_s:.1f}"]
        rows.append([*row, f"{100 * cell.error:+.0f} %"])
    return header, rows


def _choice_rows(picked: list[Choice]) -> tuple[list[str], list[list[str]]]:
    rows = [[c.link, str(c.ranks), c.model, c.chosen, c.best, f"{100 * c.regret:.1f} %"] for c in picked]
    return ["link", "ranks", "model", "chosen", "best measured", "regret"], rows


def _split(name: str) -> tuple[str, int]:
    link, ranks = name.rsplit(" x ", 1)
    return link, int(ranks)


def _profile(found: dict[str, Any]) -> ModelProfile:
    """The step in the middle, and by how much the others differ from it."""
    profiles = sorted((_load(ModelProfile, text) for text in found["profiles"]), key=lambda p: p.compute_s)
    middle = profiles[len(profiles) // 2]
    apart = median(abs(each.compute_s - middle.compute_s) for each in profiles)
    return replace(middle, jitter=_NORMAL * apart / middle.compute_s)


def _load(kind: Any, text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stored.toml"
        path.write_text(text)
        return kind.load(path)
