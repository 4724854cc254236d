"""`gradsync doctor RUN`: what happened first in a run that is over, or still going on, by its traces."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsync.cli.plan.figures import printable
from gradsync.cli.shared import BadInput
from gradsync.report.post_mortem.first_event import Incident, first_event, quiet_end
from gradsync.report.post_mortem.last_seen import LastSeen, last_seen
from gradsync.report.summary import Summary, summarize
from gradsync.trace.reader import RunTrace, read_run
from gradsync.units import show_seconds

_MOST_ROWS = 64


def tell_run(console: Console, folder: Path, as_json: bool) -> int:
    """Say it; 1 if something happened, else 0."""
    try:
        run = read_run(folder)
    except ValueError as error:
        raise BadInput(f"gradsync doctor: {printable(str(error))}") from None
    now = time.time()
    incident, summary = first_event(run, now), summarize(run)
    if as_json:
        console.out(json.dumps(_record(run, incident, summary, now), indent=1))
    else:
        _show(console, run, incident, summary, now)
    return 1 if incident is not None or slow(summary) else 0


def slow(summary: Summary) -> list[str]:
    """Ranks and links that the others wait for."""
    return [*(blame.text for blame in summary.blame), *(link.text for link in summary.links)]


def _show(console: Console, run: RunTrace, incident: Incident | None, summary: Summary, now: float) -> None:
    head = quiet_end(run, now) if incident is None else incident.text
    console.print(Text(printable(head), style="bold" if incident is None else "bold red"))
    if incident is not None:
        console.print(Text(f"What to do: {printable(incident.advice)}"))
    for sentence in slow(summary):
        console.print(Text(f"Slow: {printable(sentence)}.", style="yellow"))
    console.print()
    console.print(_table(last_seen(run)))
    if incident is None and not slow(summary):
        console.print(Text(f"gradsync report {printable(str(run.folder))} says what its steps cost.", style="dim"))


def _table(seen: dict[int, LastSeen]) -> Table:
    table = Table(title="the ranks, when they were last seen", title_justify="left", title_style="bold")
    table.add_column("rank", justify="right")
    for name in ("host", "pid"):
        table.add_column(name)
    table.add_column("step", justify="right")
    table.add_column("before\nthe last", justify="right")
    for name in ("what it did", "how it ended"):
        table.add_column(name, overflow="fold")
    last = max((each.at for each in seen.values() if each.at is not None), default=0.0)
    for each in list(seen.values())[:_MOST_ROWS]:
        table.add_row(*(Text(printable(cell)) for cell in _row(each, last)))
    return table


def _row(each: LastSeen, last: float) -> list[str]:
    ended = each.ended if each.error is None else each.error.what
    step = "-" if each.step is None else str(each.step)
    ago = "-" if each.at is None else show_seconds(last - each.at)
    return [str(each.rank), each.host, str(each.pid), step, ago, each.doing.removeprefix("it "), ended or "(no word)"]


def _record(run: RunTrace, incident: Incident | None, summary: Summary, now: float) -> dict[str, Any]:
    seen = last_seen(run).values()
    return {
        "command": "doctor",
        "run": str(run.folder),
        "happened": None if incident is None else vars(incident),
        "conclusion": quiet_end(run, now) if incident is None else incident.text,
        "verdict": summary.verdict,
        "slow": slow(summary),
        "ranks": [{**each._asdict(), "error": None if each.error is None else each.error.what} for each in seen],
    }
