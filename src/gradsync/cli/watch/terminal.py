"""The live view for a terminal: verdict, ranks, how the overhead went; a line per update where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from gradsync.report.lateness import lateness, own_parts
from gradsync.report.live.feed import FeedReader, FeedUpdate
from gradsync.report.live.run_state import RunState
from gradsync.report.overhead import exposed
from gradsync.report.pictures.binning import bins, mean, quantile
from gradsync.report.pictures.overhead_chart import OverheadPoint, costs
from gradsync.report.table import Table, tabulate
from gradsync.report.wording import printable, show_share

_LOOK_S = 1.0
_USUAL = 50  # steps that the table of ranks speaks of
_DRAWN = 400  # steps of the sparkline
_MOST_RANKS = 16
_SPARKS = "▁▂▃▄▅▆▇█"
_PHASES = ("input", "forward", "backward", "optimizer")
_COLOURS = {"live": "green", "quiet": "yellow", "ended": "dim", "failed": "red"}


def watch(
    reader: FeedReader, update: FeedUpdate, console: Console, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show a run until it is over."""
    if console.is_terminal:
        with Live(view(update, console.width), console=console, auto_refresh=False) as live:
            while not update.state.over:
                sleep(_LOOK_S)
                update = reader.look()
                live.update(view(update, console.width), refresh=True)
        return
    told = None
    while True:
        if told != (told := line(update)):
            console.print(told, markup=False, soft_wrap=True)
        if update.state.over:
            return
        sleep(_LOOK_S)
        update = reader.look()


def line(update: FeedUpdate) -> str:
    """The whole view in a line, for a log."""
    return f"{update.state.text}: {update.summary.verdict}"


def view(update: FeedUpdate, width: int) -> RenderableType:
    """The whole picture; every text in it comes without control characters."""
    summary = update.summary
    recent = tabulate(update.run, _USUAL)
    parts: list[RenderableType] = [_heading(update.state), Text(summary.verdict, style="bold")]
    named = [blame.text for blame in summary.blame] + [link.text for link in summary.links]
    parts += [Text(f"• {text}", style="red") for text in named[:6]]
    parts += [Text(), ranks(recent)]
    if len(recent.ranks) > _MOST_RANKS:
        parts.append(Text(f"{len(recent.ranks) - _MOST_RANKS} ranks that are less late are left out", style="dim"))
    parts += [Text(), _overhead(costs(tabulate(update.run, _DRAWN)), width)]
    parts += [Text(f"! {warned.text}", style="yellow") for warned in summary.warnings[:4]]
    parts += [Text(f"! step {error.step}: {printable(error.text)}", style="red") for error in summary.errors[:4]]
    return Group(*parts)


def ranks(table: Table) -> Grid:
    """A line per rank: medians over the last steps, in ms."""
    late = lateness(table)
    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim")
    grid.add_column("rank")
    for head in ("step ms", *_PHASES, "late", "exposed"):
        grid.add_column(head, justify="right")
    lines = {rank: _numbers(table, rank, [late[key].late_s for key in late if key[1] == rank]) for rank in table.ranks}
    shown = sorted(sorted(table.ranks, key=lambda rank: -lines[rank][-2])[:_MOST_RANKS])
    for rank in shown:
        step_ms, *phases, late_ms, exposed_ms = lines[rank]
        is_late = late_ms > 0.1 * step_ms > 0
        grid.add_row(
            f"{rank}", *(f"{each:.1f}" for each in (step_ms, *phases)),
            Text(f"{late_ms:.1f}", style="bold red" if is_late else ""), f"{exposed_ms:.1f}",
        )  # fmt: skip
    return grid


def _numbers(table: Table, rank: int, late: Sequence[float]) -> list[float]:
    """Milliseconds: step, phases, lateness, exposed."""
    cells = list(table.column(rank))
    parts = [own_parts(cell) for cell in cells]
    found = [quantile([cell.step_s for cell in cells], 0.5)]
    found += [quantile([part[name] for part in parts], 0.5) for name in _PHASES]
    found += [max(0.0, quantile(late, 0.5)), quantile([exposed(cell) for cell in cells], 0.5)]
    return [1e3 * each for each in found]


def _heading(state: RunState) -> Text:
    return Text.assemble(("● ", _COLOURS[state.kind]), (state.text, "dim"))


def _overhead(points: Sequence[OverheadPoint], width: int) -> Text:
    if not points:
        return Text("overhead: no step yet", style="dim")
    values = [mean(point.both for point in group) for group in bins(points, max(10, width - 36))]
    return Text.assemble(
        ("overhead ", "dim"), sparkline(values, top=max(0.1, *values)), (f" {show_share(values[-1])} now, ", "dim"),
        (f"at most {show_share(max(values))}", "dim"),
    )  # fmt: skip


def sparkline(values: Sequence[float], top: float) -> str:
    """A block per value, from nothing to `top`.

    >>> sparkline([0, 0.5, 1], 1)
    '▁▅█'
    """
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(last * min(1.0, max(0.0, value / top)) + 1e-9)] for value in values)
