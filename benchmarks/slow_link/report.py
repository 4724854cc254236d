"""The tables of README.md, from results.json: each stands between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import bench_harness
from slow_link.store import Results
from slow_link.target import Clock, Run, clock, is_timed, reached_at, runs_by_task, target_of, title_of
from slow_link.variants import BASE, DDPS, EXACT, HALF, VARIANTS

SEEDS = 3  # what a mean should have
GROWTH = {  # the same model and optimizer, by the number of ranks and what each of them sees in a step
    "n = 2, batch 32": "2 replicas, large, batch 32, 1000 steps",
    "n = 8, batch 4": "8 replicas, large, 1000 steps",
    "n = 32, batch 4": "32 replicas, large, 1000 steps",
}

Facts = dict[str, Any]


def write(readme: Path, results: Results) -> None:
    """Put every table into its place; a place without results says so."""
    timed, runs = results.get("steps", {}), runs_by_task(results.get("loss", {}))
    steps = [f"### {rate}\n\n{_where(facts)}\n\n{steps_table(facts)}" for rate, facts in timed.items()]
    loss = [loss_part(task, arms, timed) for task, arms in runs.items()]
    text = readme.read_text()
    for name, parts in (("steps", steps), ("loss", loss), ("growth", [growth_table(runs)])):
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


def loss_part(task: str, arms: dict[str, list[Run]], steps: Facts) -> str:
    """A task with its heading, where it ran, and its table."""
    runs = [run for each in arms.values() for run in each]
    machines, commits = {run.machine: 0 for run in runs}, {run.commit: 0 for run in runs}  # as sets, but in order
    where = f"{'; '.join(machines)}; {'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}."
    return f"### {title_of(task)}\n\n{where}\n\n{loss_table(arms, steps if is_timed(task) else {})}"


def loss_table(arms: dict[str, list[Run]], steps: Facts) -> str:
    """An arm per row: what it ends in; and, where steps were timed, how long it takes to what the exact one ends in."""
    target = target_of(arms)
    header = ["arm", "seeds", "held-out loss (per seed)", "worse than exact", "training loss, last 50 steps"]
    if steps:
        header += [f"steps to {target:.3f}" if target else "steps to target", *(f"time at {rate}" for rate in steps)]
    exact = arms.get(EXACT, [])
    rows = [[name, *_loss_row(name, arms[name], exact, target, steps)] for name in VARIANTS if name in arms]
    return bench_harness.table(header, rows)


def _loss_row(name: str, runs: list[Run], exact: list[Run], target: float | None, steps: Facts) -> list[str]:
    finals = [run.final_held_out for run in runs]
    ends = [
        _seeds(len(runs)),
        f"{mean(finals):.4f} ({', '.join(f'{x:.3f}' for x in finals)})",
        _worse(runs, exact) if name != EXACT else "–",
        f"{mean(run.final_train for run in runs):.4f}",
    ]
    if not steps:
        return ends
    reached = [reached_at(run.held_out, target) if target else None for run in runs]
    count = None if None in reached else mean(step for step in reached if step is not None)
    found = f"{count:.0f}" if count is not None else _not_reached(reached)
    return [*ends, found, *(_time(clock(name, facts["arms"]), count) for facts in steps.values())]


def growth_table(runs: dict[str, dict[str, list[Run]]]) -> str:
    """An arm per row, a number of ranks per column: how much worse than exact, and from how many seeds."""
    by_n = {column: runs.get(task, {}) for column, task in GROWTH.items()}
    last = list(by_n.values())[1:]
    names = [name for name in VARIANTS if name != EXACT and any(name in arms for arms in last)]
    rows = [[name, *(_growth(arms, name) for arms in by_n.values())] for name in names]
    exact = [[run.final_held_out for run in arms.get(EXACT, [])] for arms in by_n.values()]
    ends = [f"{mean(each):.4f} nats ({_seeds(len(each))})" if each else "not run" for each in exact]
    return bench_harness.table(["arm (seeds)", *by_n], [[EXACT, *ends], *rows])


def _growth(arms: dict[str, list[Run]], name: str) -> str:
    worse = _excess(arms.get(name, []), arms.get(EXACT, []))
    return f"{_percent(mean(worse))} % ({_seeds(len(worse))})" if worse else "not run"


def _seeds(number: int) -> str:
    """
    >>> _seeds(3), _seeds(1)
    ('3', '1 only')
    """
    return str(number) if number >= SEEDS else f"{number} only"


def _not_reached(reached: list[float | None]) -> str:
    missed = reached.count(None)
    return "not reached" if missed == len(reached) else f"not reached by {missed} of {len(reached)}"


def _excess(runs: list[Run], exact: list[Run]) -> list[float]:
    """In percent of exact averaging, within a seed."""
    pairs = [(run, other) for run in runs for other in exact if run.seed == other.seed]
    return [100 * (run.final_held_out / other.final_held_out - 1) for run, other in pairs]


def _worse(runs: list[Run], exact: list[Run]) -> str:
    """The mean, and from seed to seed."""
    worse = _excess(runs, exact)
    if not worse:
        return "–"
    spread = f" ({_percent(min(worse))} to {_percent(max(worse))})" if len(worse) > 1 else ""
    return f"**{_percent(mean(worse))} %**{spread}"


def _percent(value: float) -> str:
    """
    >>> _percent(0.314), _percent(-0.001)
    ('+0.31', '+0.00')
    """
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0: there is no −0


def _time(seconds_of: Clock | None, count: float | None) -> str:
    if seconds_of is None or count is None:
        return "–"
    seconds = seconds_of(count)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
