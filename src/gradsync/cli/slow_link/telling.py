"""A slow link's result as a table and as sentences; pure."""

from __future__ import annotations

from rich.table import Table

from gradsync.cli.slow_link.crossing import UNTIMED
from gradsync.cli.slow_link.result import Result
from gradsync.cli.story.arms import ALONE, DDP

FOOTNOTE = (
    f"step ms: median (middle half) without the first {UNTIMED} steps; the arms take turns. MB sent: by each rank in a "
    "step, as the link counted them, without headers. DDP: gradient_as_bucket_view=True. validation loss: rank 0's, on "
    "files held out, in nats per character."
)
_CLEARLY = 1.1  # a gain smaller than this is none


def table(result: Result) -> Table:
    """One line per arm."""
    title = f"{result.steps} steps on 2 ranks, {_threads(result.threads_per_rank)} each, over {result.rate}"
    grid = Table(title=title, title_justify="left", title_style="bold")
    grid.add_column("arm", no_wrap=True)
    for name in ("step ms", "times as fast\nas DDP", "MB\nsent", "validation\nloss"):
        grid.add_column(name, justify="right", no_wrap=True)
    for arm in result.arms:
        grid.add_row(
            arm.arm,
            f"{arm.step_ms.median:.0f} ({arm.step_ms.low:.0f}-{arm.step_ms.high:.0f})",
            f"{arm.times_as_fast_as_ddp:.2f}",
            f"{arm.sent_mb:.2f}",
            f"{arm.validation_loss:.4f}",
        )
    return grid


def sentences(result: Result) -> list[str]:
    """What one sees in the table."""
    return [_on_speed(result), _on_a_fast_link(result), _on_loss(result)]


def _on_speed(result: Result) -> str:
    best, exact = result.best, result.exact
    gain = exact.step_ms.median / best.step_ms.median
    instead = f"it sends {best.sent_mb:.2f} MB where {exact.arm} without compression sends {exact.sent_mb:.2f}"
    if gain < _CLEARLY:
        return f"On this link compression buys nothing ({best.arm}): {instead}, but that is not what a step waits for."
    return f"On this link compression makes a step {gain:.1f} times as fast ({best.arm}): {instead}."


def _on_a_fast_link(result: Result) -> str:
    alone, ddp = result.arm(ALONE).step_ms.median, result.arm(DDP).step_ms.median
    return (
        f"Without any sync a step takes {alone:.0f} ms, with DDP {ddp:.0f}. On a link so fast that the two are alike "
        "compression would buy nothing, and still change the gradients: that is why compress=None is the default."
    )


def _on_loss(result: Result) -> str:
    behind = [arm.arm for arm in result.compressed if not result.keeps_up(arm)]
    but = f", but for {' and '.join(behind)}" if behind else ""
    return f"After the same {result.steps} steps the loss is DDP's within 1 %{but}: try it on your own model."


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
