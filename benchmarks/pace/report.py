"""The tables of README.md, from results.json: each stands between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import bench_harness
from pace import clock, slow_ranks
from pace.clock import Timed
from pace.variants import BASE, EXACT, LINK, PEER, VARIANTS
from slow_link.report import _filled as filled
from slow_link.store import Results
from slow_link.target import Curve, Run

Facts = dict[str, Any]

_NEAR = 1.01  # times DDP's final loss
_FIFTH = 0.2  # of DDP's time


def write(readme: Path, results: Results) -> None:
    """Put every table into its place; a place without results says so."""
    timed = clock.timed_of(results)
    tables = {
        "paces": [f"### {task}\n\n{paces_table(arms, timed)}" for task, arms in clock.tasks_of(results).items()],
        "steps": [f"### {rate}\n\n{steps_table(facts)}" for rate, facts in results.get("steps", {}).items()],
        "stragglers": slow_ranks.tables(results.get("stragglers", {})),
    }
    text = readme.read_text()
    for name, parts in tables.items():
        text = filled(text, name, "\n\n".join(parts) or "Not measured yet.")
    readme.write_text(text)


def where(facts: Facts) -> str:
    machine = facts["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, commit {facts['commit']}"


# Loss at equal samples, at equal time, and the time to a loss


def paces_table(arms: dict[str, list[Run]], timed: Timed) -> str:
    """An arm per row."""
    whole = clock.peers_time(arms, timed)
    final = mean(run.final_held_out for run in arms[PEER]) if PEER in arms else None
    header = [
        "pace",
        "loss at equal samples (per seed)",
        f"against {EXACT}",
        f"loss after {_seconds(whole)}: DDP's whole time",
        f"after {_seconds(whole and _FIFTH * whole)}: a fifth",
        f"time to DDP's {final:.3f}" if final else "time to DDP's loss",
        "to within 1 %",
        "MB per step",
        f"steps/s at {LINK}",
    ]
    rows = [[name, *_row(name, arms, timed, whole, final)] for name in VARIANTS if name in arms]
    return bench_harness.table(header, rows)


def _row(name: str, arms: dict[str, list[Run]], timed: Timed, whole: float | None, final: float | None) -> list[str]:
    runs, seconds = arms[name], clock.step_s(timed, name)
    curve = clock.by_the_clock(runs, timed, name)
    times = [clock.time_to(curve, target) for target in (final, final and _NEAR * final)]
    return [
        _losses([_at_equal_samples(run, name) for run in runs]),
        _worse(name, runs, arms.get(EXACT, [])),
        *(_loss_after(curve, whole and share * whole) for share in (1, _FIFTH)),
        *(_share(time, whole, curve) for time in times),
        f"{timed[name]['sent_nbytes'] / 1e6:.3f}" if name in timed else "–",
        f"{1 / seconds:.1f}" if seconds else "–",
    ]


def _at_equal_samples(run: Run, name: str) -> float:
    """The loss of a stretched run when it had read as many samples as the others."""
    return clock.loss_at(run.held_out, run.held_out[-1][0] / VARIANTS[name].stretch) or run.final_held_out


def _losses(losses: list[float]) -> str:
    half = (max(losses) - min(losses)) / 2
    return f"{mean(losses):.3f} ± {half:.3f} ({', '.join(f'{loss:.3f}' for loss in losses)})"


def _worse(name: str, runs: list[Run], exact: list[Run]) -> str:
    """Within a seed; the mean, and from seed to seed."""
    pairs = [(_at_equal_samples(run, name), other) for run in runs for other in exact if run.seed == other.seed]
    worse = [100 * (loss / other.final_held_out - 1) for loss, other in pairs]
    return f"{mean(worse):+.1f} % ({min(worse):+.1f} to {max(worse):+.1f})" if worse else "–"


def _loss_after(curve: Curve | None, seconds: float | None) -> str:
    loss = clock.loss_at(curve, seconds) if curve and seconds else None
    return f"{loss:.3f}" if loss else "–"


def _share(time: float | None, whole: float | None, curve: Curve | None) -> str:
    """In shares of DDP's time."""
    if curve is None or whole is None:
        return "–"
    return f"**{time / whole:.2f}** ({_seconds(time)})" if time is not None else "not reached"


def _seconds(seconds: float | None) -> str:
    return f"{seconds:.0f} s" if seconds is not None else "…"


# Seconds and bytes of a step


def steps_table(facts: Facts) -> str:
    """An arm per row; ratios are medians of the ratios within a round."""
    samples = {name: arm["samples_s"] for name, arm in facts["arms"].items()}
    rows = [
        [
            name,
            _milliseconds(taken),
            *(_ratio(samples, *pair) for pair in ((name, BASE), (PEER, name))),
            f"{facts['arms'][name]['sent_nbytes'] / 1e6:.3f}",
        ]
        for name, taken in samples.items()
    ]
    about = f"{where(facts)}; {facts['parameters'] / 1e6:.2f} million parameters, {facts['rounds']} rounds; "
    about += (
        f"load before it {facts['load_before']:.1f}; what waits sends {facts['beats_nbytes_per_s'] / 1e3:.1f} KB/s."
    )
    table = bench_harness.table(["arm", "ms per step", "/ no sync", "DDP / it", "MB sent per step"], rows)
    return f"{about}\n\n{table}"


def _ratio(samples: bench_harness.Samples, arm: str, base: str) -> str:
    if arm not in samples or base not in samples:
        return "–"
    return f"{median(a / b for a, b in zip(samples[arm], samples[base], strict=True)):.2f}"


def _milliseconds(samples: list[float]) -> str:
    if len(samples) < 2:
        return f"{1e3 * samples[0]:.0f}"
    low, middle, high = (1e3 * q for q in quantiles(samples, n=4))
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"
