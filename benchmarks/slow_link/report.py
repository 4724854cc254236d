"""The tables of README.md, from results.json: each stands between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import bench_harness
from slow_link.arms import ARMS, BASE, DDPS, EXACT, HALF
from slow_link.store import Results
from slow_link.target import Run, reached_at, runs_by_task, target_of

Facts = dict[str, Any]


def write(readme: Path, results: Results) -> None:
    """Put every table into its place; a place without results says so."""
    timed, runs = results.get("steps", {}), runs_by_task(results.get("loss", {}))
    steps = [f"### {rate}\n\n{_where(facts)}\n\n{steps_table(facts)}" for rate, facts in timed.items()]
    loss = [f"### {task}\n\n{loss_table(arms, timed)}" for task, arms in runs.items()]
    text = readme.read_text()
    for name, parts in (("steps", steps), ("loss", loss)):
        text = _filled(text, name, "\n\n".join(parts) or "Not measured yet.")
    readme.write_text(text)


def _filled(text: str, name: str, content: str) -> str:
    """
    >>> _filled("a <!-- begin x -->old<!-- end x --> b", "x", "new").split()
    ['a', '<!--', 'begin', 'x', '-->', 'new', '<!--', 'end', 'x', '-->', 'b']
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    # By a function: a replacement string would have its backslashes read.
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{content}\n\n{end}", text, flags=re.DOTALL)


def _where(facts: Facts) -> str:
    machine = facts["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, commit {facts['commit']}; "
        f"{facts['parameters'] / 1e6:.1f} million parameters, {facts['rounds']} rounds; "
        f"load before it {facts['load_before']:.1f}; what waits sends {facts['beats_nbytes_per_s'] / 1e3:.1f} KB/s."
    )


# Step time and bytes


def steps_table(facts: Facts) -> str:
    """An arm per row."""
    samples = {name: arm["samples_s"] for name, arm in facts["arms"].items()}
    peer = best_ddp(samples)
    rows = [[name, *_row(name, facts["arms"][name], samples, peer)] for name in samples]
    header = ["arm", "ms per step", "/ no sync", f"{peer or 'DDP'} / it", "fp16 hook / it", "MB sent per step"]
    header += ["claimed", "sent / claimed"]
    return bench_harness.table(header, rows)


def best_ddp(samples: bench_harness.Samples) -> str | None:
    """DDP at its best; None if it was not measured."""
    return min((name for name in DDPS if name in samples), key=lambda name: median(samples[name]), default=None)


def _row(name: str, arm: Facts, samples: bench_harness.Samples, peer: str | None) -> list[str]:
    base = _ratio(samples, name, BASE) if BASE in samples else "–"
    gains = [f"**{_ratio(samples, other, name)}**" if other in samples else "–" for other in (peer, HALF)]
    claimed = arm["claimed_nbytes"]
    share = f"{arm['sent_nbytes'] / claimed:.3f}" if claimed else "–"
    sent = [f"{nbytes / 1e6:.3f}" for nbytes in (arm["sent_nbytes"], claimed)]
    return [_milliseconds(samples[name]), base, *gains, *sent, share]


def _ratio(samples: bench_harness.Samples, arm: str, base: str) -> str:
    """Median of the ratios within a round."""
    return f"{median(a / b for a, b in zip(samples[arm], samples[base], strict=True)):.2f}"


def _milliseconds(samples: list[float]) -> str:
    low, middle, high = (1e3 * q for q in quantiles(samples, n=4))
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"


# Loss, and the time to it


def loss_table(arms: dict[str, list[Run]], steps: Facts) -> str:
    """An arm per row: what it ends in, and how long it takes to what the exact one ends in."""
    target = target_of(arms)
    header = ["arm", "held-out loss (per seed)", "worse than exact", "training loss, last 50 steps"]
    header += [f"steps to {target:.3f}" if target else "steps to target", *(f"time at {rate}" for rate in steps)]
    exact = arms.get(EXACT, [])
    rows = [[name, *_loss_row(name, arms[name], exact, target, steps)] for name in ARMS if name in arms]
    return bench_harness.table(header, rows)


def _loss_row(name: str, runs: list[Run], exact: list[Run], target: float | None, steps: Facts) -> list[str]:
    finals = [run.final_held_out for run in runs]
    reached = [reached_at(run.held_out, target) if target else None for run in runs]
    count = None if None in reached else mean(step for step in reached if step is not None)
    return [
        f"{mean(finals):.4f} ({', '.join(f'{x:.3f}' for x in finals)})",
        _worse(runs, exact),
        f"{mean(run.final_train for run in runs):.4f}",
        f"{count:.0f}" if count is not None else "not reached",
        *(_time(facts["arms"].get(name), count) for facts in steps.values()),
    ]


def _worse(runs: list[Run], exact: list[Run]) -> str:
    """Within a seed; the mean, and from seed to seed."""
    pairs = [(run, other) for run in runs for other in exact if run.seed == other.seed]
    worse = [100 * (run.final_held_out / other.final_held_out - 1) for run, other in pairs]
    return f"**{mean(worse):+.2f} %** ({min(worse):+.2f} to {max(worse):+.2f})" if worse else "–"


def _time(arm: Facts | None, count: float | None) -> str:
    if arm is None or count is None:
        return "–"
    seconds = count * median(arm["samples_s"])
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
