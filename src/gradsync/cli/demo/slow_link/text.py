"""A slow link's result as a table and as sentences; pure."""

from __future__ import annotations

from rich.table import Table

from gradsync.cli.demo.slow_link.link_result import LinkResult
from gradsync.cli.demo.slow_link.train_over_link import UNTIMED
from gradsync.cli.demo.story.text import on_others, show_threads
from gradsync.cli.demo.story.train_variants import ALONE, DDP

FOOTNOTE = (
    f"step ms: median (middle half) without the first {UNTIMED} steps; the arms take turns. MB sent: by each rank in a "
    "step, as the link counted them, without headers. DDP: gradient_as_bucket_view=True. validation loss: rank 0's, on "
    "files held out, in nats per character. measured: how much higher than exactly the loss was after 1000 steps of a "
    "larger model with AdamW (benchmarks/slow_link)."
)
_CLEARLY = 1.1  # a gain smaller than this is none


def table(result: LinkResult) -> Table:
    """One line per arm."""
    title = f"{result.steps} steps on 2 ranks, {show_threads(result.threads_per_rank)} each, over {result.rate}"
    grid = Table(title=title, title_justify="left", title_style="bold")
    grid.add_column("arm", no_wrap=True)
    for name in ("step ms", "times as fast\nas DDP", "MB\nsent", "validation\nloss", "loss,\nmeasured"):
        grid.add_column(name, justify="right", no_wrap=True)
    for arm in result.arms:
        grid.add_row(
            arm.arm,
            f"{arm.step_ms.median:.0f} ({arm.step_ms.low:.0f}-{arm.step_ms.high:.0f})",
            f"{arm.times_as_fast_as_ddp:.2f}",
            f"{arm.sent_mb:.2f}",
            f"{arm.validation_loss:.4f}",
            "" if arm.measured_worse is None else f"+{_percent(arm.measured_worse)}",
        )
    return grid


def sentences(result: LinkResult) -> list[str]:
    """Say what one sees in the table; nothing of times that others have spoiled."""
    times = [on_others(result)] if result.disturbed else [_on_speed(result), _on_a_fast_link(result)]
    return [*times, _on_loss(result)]


def _on_speed(result: LinkResult) -> str:
    best, exact = result.best, result.exact
    gain = exact.step_ms.median / best.step_ms.median
    instead = f"it sends {best.sent_mb:.2f} MB where {exact.arm} without compression sends {exact.sent_mb:.2f}"
    if gain < _CLEARLY:
        return f"On this link compression buys nothing ({best.arm}): {instead}, but that is not what a step waits for."
    return (
        f"On this link compression makes a step {gain:.1f} times as fast ({best.arm}, the fastest whose loss was "
        f"measured within 1 % of exact averaging's): {instead}."
    )


def _on_a_fast_link(result: LinkResult) -> str:
    alone, ddp = result.arm(ALONE).step_ms.median, result.arm(DDP).step_ms.median
    return (
        f"Without any sync a step takes {alone:.0f} ms, with DDP {ddp:.0f}. On a link so fast that the two are alike "
        "compression would buy nothing, and still change the gradients: that is why compress=None is the default."
    )


def _on_loss(result: LinkResult) -> str:
    known = sorted((arm.measured_worse, arm.arm) for arm in result.compressed if arm.measured_worse is not None)
    told = ", ".join(f"{name} +{_percent(worse)}" for worse, name in known)
    behind = [arm.arm for arm in result.compressed if not result.keeps_up(arm)]
    here = f"of these only {' and '.join(behind)} fell behind by 1 %" if behind else "none of these fell behind by 1 %"
    return (
        f"What compression costs in loss {result.steps} steps do not tell ({here}). After 1000, where that was "
        f"measured, it was {told} above exact averaging: try it on your own model."
    )


def _percent(share: float) -> str:
    """
    >>> _percent(0.0001), _percent(0.0031), _percent(0.1841)
    ('0.01 %', '0.31 %', '18 %')
    """
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.2f} %"
