"""A slow input in words: the table of ranks, what a stopwatch shows, what the report says."""

from __future__ import annotations

from rich.table import Table

from gradsync.cli.bench.other_processes import disturbance, disturbing
from gradsync.cli.demo.story.slow_input import SlowInput

FOOTNOTE = (
    "step ms: the median step from one synchronization's end to the next, what a stopwatch around the step or an "
    "all-reduce shows. waits ms: of these, with nothing to compute. The rest: its own work by phase, from the trace."
)


def table(result: SlowInput) -> Table:
    """One line per rank."""
    names = list(result.ranks[0].phases_ms)
    grid = Table(title=_title(result), title_justify="left", title_style="bold")
    for name in ("rank", "step ms", "waits ms", *(f"{name} ms" for name in names)):
        grid.add_column(name, justify="right", no_wrap=True)
    for rank in result.ranks:
        times = (rank.step_ms, rank.exposed_ms, *(rank.phases_ms[name] for name in names))
        grid.add_row(str(rank.rank), *(f"{time:.1f}" for time in times))
    return grid


def sentences(result: SlowInput) -> list[str]:
    """Say what one sees in the result."""
    said = [f"gradsync report: {line}" for line in [result.verdict, *result.blame]]
    told = [_by_stopwatch(result), *said, *([] if result.blame else [_nobody(result)])]
    return [*told, _on_others(result)] if disturbing(result.busy_cores_of_others) else told


def _on_others(result: SlowInput) -> str:
    theirs = disturbance(result.busy_cores_of_others, result.cores)
    return f"{theirs}: what rank {result.slowed}'s sleep does not explain may be their doing."


def _title(result: SlowInput) -> str:
    return (
        f"{result.steps} steps on {len(result.ranks)} ranks; in every step rank {result.slowed} "
        f"sleeps {result.slowed_ms:.0f} ms in its input"
    )


def _by_stopwatch(result: SlowInput) -> str:
    steps = [rank.step_ms for rank in result.ranks]
    apart = max(steps) - min(steps)
    return (
        f"By a stopwatch a step takes {min(steps):.1f} ms on the fastest rank and {max(steps):.1f} ms on the slowest, "
        f"{apart:.1f} ms apart: an all-reduce makes every rank as slow as the last."
    )


def _nobody(result: SlowInput) -> str:
    return f"The report blames nobody, though rank {result.slowed} was slowed: try more steps, or a quieter machine."
