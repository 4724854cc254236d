"""The tables of README.md, from results.json."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import bench_harness
from signals.cost import BARE, PAIRS, TRACED, WATCHED
from slow_link.report import _filled as filled
from slow_link.store import Results

Facts = dict[str, Any]

_NAMED = ("report_names_it", "watch_names_it", "doctor_names_it")
_GOALS = {("10 ms", f"{TRACED} / {BARE}"): 0.01, ("50 ms", f"{WATCHED} / {BARE}"): 0.02}


def write(readme: Path, results: Results) -> None:
    """Put every table into its place; a place without results says so."""
    tables = {
        "cost": [_cost(name, facts) for name, facts in results.get("cost", {}).items()],
        "inside": [_inside(results["inside"])] if results.get("inside") else [],
        "faults": [_faults(results["faults"])] if results.get("faults") else [],
        "gpu": [_gpu(results["gpu"])] if results.get("gpu") else [],
    }
    text = readme.read_text()
    for name, parts in tables.items():
        text = filled(text, name, "\n\n".join(parts) or "Not measured yet.")
    readme.write_text(text)


def _where(*cells: Facts) -> str:
    """On what machines, and of which commits, the cells of a table are."""
    places = []
    for facts in cells:
        machine = facts["machine"]
        place = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, commit {facts['commit']}"
        if place not in places:
            places.append(place)
    return "; ".join(places)


def _cost(workload: str, facts: Facts) -> str:
    rows = []
    for arm, base in PAIRS:
        cost = facts["costs"][f"{arm} / {base}"]
        rows.append(
            [
                f"{arm} against {base}",
                *(bench_harness.milliseconds(facts["samples_s"][name]) for name in (base, arm)),
                f"{1e6 * cost['difference_s']:+.0f}",
                f"**{_percent(cost['share'])}** ({_percent(cost['share_low'])} to {_percent(cost['share_high'])})",
                f"{_percent(cost['median_low'])} to {_percent(cost['median_high'])}",
                _goal(workload, f"{arm} / {base}", cost),
            ]
        )
    header = ["what", "ms before", "ms with it", "µs more", "more", "the median lies in (95 %)", "goal"]
    about = (
        f"{_where(facts)}; {facts['parameters'] / 1e6:.2f} million parameters, {facts['launches']} launches of "
        f"{facts['rounds']} rounds, load before it {facts['load_before']:.1f}; the trace takes "
        f"{facts['trace_nbytes_per_step']} bytes per step and rank."
    )
    return f"### A step of about {workload}\n\n{about}\n\n{bench_harness.table(header, rows)}"


def _inside(cells: dict[str, Facts]) -> str:
    rows = []
    for workload, facts in cells.items():
        steps_s, inside_s = facts["steps_s"], facts["inside_s"]
        trace = [a / s for a, s in zip(inside_s["trace"], steps_s, strict=True)]
        watched = [(t + d) / s for t, d, s in zip(inside_s["trace"], inside_s["digests"], steps_s, strict=True)]
        rows.append(
            [
                f"{workload} ({1e3 * median(steps_s):.1f} measured)",
                *(f"{1e6 * median(taken):.0f} µs" for taken in inside_s.values()),
                f"{_spread(trace)}{_judged(trace, 0.01) if workload == '10 ms' else ''}",
                f"{_spread(watched)}{_judged(watched, 0.02) if workload == '50 ms' else ''}",
            ]
        )
    first = next(iter(cells.values()))
    header = ["step", *first["inside_s"], "trace, of the step", "trace and digests, of the step"]
    about = f"{_where(first)}; {len(first['steps_s'])} launches, load before them {first['load_before']:.1f}."
    return f"{about}\n\n{bench_harness.table(header, rows)}"


def _spread(shares: list[float]) -> str:
    return f"**{100 * median(shares):.2f} %** ({100 * min(shares):.2f} to {100 * max(shares):.2f} %)"


def _judged(shares: list[float], goal: float) -> str:
    met = sum(share <= goal for share in shares)
    return f"; ≤ {100 * goal:.0f} %: {'met' if met == len(shares) else f'met in {met} of {len(shares)}'}"


def _gpu(cells: dict[str, Facts]) -> str:
    rows = []
    for name, facts in cells.items():
        cost, step_s = facts["costs"][f"{TRACED} / {BARE}"], median(facts["samples_s"][BARE])
        rows.append(
            [
                name,
                *(bench_harness.milliseconds(facts["samples_s"][arm]) for arm in (BARE, TRACED)),
                f"**{_percent(cost['share'])}** ({_percent(cost['share_low'])} to {_percent(cost['share_high'])})",
                f"{_percent(cost['median_low'])} to {_percent(cost['median_high'])}",
                f"{1e3 * facts['digests_s']:.2f} ms, {100 * facts['digests_s'] / step_s:.1f} %",
            ]
        )
    first = next(iter(cells.values()))
    header = ["parameters", "ms before", "ms with a trace", "more", "the median lies in (95 %)", "digests of a step"]
    return f"{first['machine']['gpu']}; {_where(first)}.\n\n{bench_harness.table(header, rows)}"


def _goal(workload: str, pair: str, cost: dict[str, float]) -> str:
    goal = _GOALS.get((workload, pair))
    if goal is None:
        return "–"
    if cost["median_low"] <= goal < cost["median_high"]:
        told = "too noisy to say"
    else:
        told = "met" if cost["share"] <= goal else "**missed**"
    return f"≤ {100 * goal:.0f} %: {told}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _faults(cells: dict[str, Facts]) -> str:
    kinds: dict[str, list[Facts]] = {}
    for facts in cells.values():
        kinds.setdefault(facts["what"], []).append(facts)
    rows = [[what, str(len(runs)), *_counts(runs), _misses(runs)] for what, runs in kinds.items()]
    header = ["fault", "runs", "report is right", "watch is right", "doctor is right", "what was said instead"]
    return f"{_where(*cells.values())}.\n\n{bench_harness.table(header, rows)}"


def _counts(runs: list[Facts]) -> list[str]:
    return [str(sum(run[key] for run in runs)) for key in _NAMED]


def _misses(runs: list[Facts]) -> str:
    """At most three, each as the report or the doctor put it."""
    wrong = [run for run in runs if not all(run[key] for key in _NAMED)]
    said = [_said(run) for run in wrong[:3]]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return "; ".join(said).replace("|", "\\|").replace("\n", " ") + more if wrong else ""


def _said(run: Facts) -> str:
    said = [*run["accused"], *run["health"], *([run["first"][:160]] if run["first"] else [])]
    return f"seed {run['truth']['seed']}: {', '.join(said) or 'nothing'}"
