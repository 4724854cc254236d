"""The report as one page of HTML that needs nothing else: no network, no script.

Every text from a run goes through `escape`. Sections have fixed ids, so that a live page can swap one for the next.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

from gradsync.report.lateness import lateness
from gradsync.report.pictures.escape import name, shown
from gradsync.report.pictures.heat_map import draw_heat
from gradsync.report.pictures.overhead_chart import draw_overhead
from gradsync.report.pictures.parameter_table import draw_parameters
from gradsync.report.pictures.staleness_chart import draw_staleness
from gradsync.report.pictures.timeline import draw_timeline
from gradsync.report.post_mortem.first_event import first_event
from gradsync.report.summary import Summary
from gradsync.report.table import tabulate
from gradsync.report.wording import show_time
from gradsync.trace.lines import Error, Health
from gradsync.trace.reader import RunTrace
from gradsync.units import show_seconds

_MOST_CELLS = 20_000  # steps x ranks that pictures look at
_LIVE_CELLS = 4_000  # and while it grows, every second
_MOST_LINES = 40  # of health, errors, blame, warnings

SCRIPT = '<script src="/watch.js" defer></script>'  # of a live page
_STYLE = files("gradsync.report.pictures").joinpath("style.css").read_text("utf-8")


def page(run: RunTrace, summary: Summary, live: bool = False) -> str:
    """The whole page. `live` adds the script of `gradsync watch`, and leaves the policy to its server's headers."""
    return laid_out(run, sections(run, summary, live), "" if live else None)


def laid_out(run: RunTrace, parts: Mapping[str, str], status: str | None) -> str:
    """Sections as a page; a live one has a status."""
    policy = f"default-src 'none'; {style_policy()}; base-uri 'none'; form-action 'none'"
    body = "\n".join(f'<section id="{key}">{html}</section>' for key, html in parts.items())
    return document(
        f"gradsync: {shown(run.folder.name or 'run', 60)}",
        f"{_header(run, status)}<main>{body}</main>",
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if status is None else SCRIPT,
    )


def document(title: str, body: str, head: str = "") -> str:
    """A page with our style around a body; the title must come escaped."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{head}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def style_policy() -> str:
    """Return what a content security policy must allow: our style, by its digest, and the icon that is none."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return f"style-src 'sha256-{digest}'; img-src data:"


def sections(run: RunTrace, summary: Summary, live: bool = False) -> dict[str, str]:
    """The page's parts by id, in their order; what a run has nothing of is empty."""
    last = max(50, (_LIVE_CELLS if live else _MOST_CELLS) // max(1, len(run.ranks)))
    table = tabulate(run, last)
    late = lateness(table)
    return {
        "verdict": f"<h1>{shown(summary.verdict)}</h1>",
        "blame": _titled("Who makes the others wait", _blame(summary)),
        "facts": _titled("In numbers", _facts(summary)),
        "warnings": _titled("Worth a look", _warnings(summary)),
        "timeline": _titled("A step", draw_timeline(table, late)),
        "overhead": _titled("Overhead over time", draw_overhead(table)),
        "lateness": _titled("Lateness by rank and step", draw_heat(table, late)),
        "parameters": _titled("Bytes and ratio by parameter", draw_parameters(run)),
        "staleness": _titled("Staleness", draw_staleness(run)),
        "health": _titled("Health and errors", _health(run, summary)),
        "measured": _titled("How it was measured", "".join(f"<p>{sentence}</p>" for sentence in _sentences(run, last))),
    }


def _titled(title: str, html: str) -> str:
    return f"<h2>{title}</h2>{html}" if html else ""


def _header(run: RunTrace, status: str | None) -> str:
    hosts = {trace.run.host for trace in run.ranks.values()}
    ranks = f"{len(run.ranks)} of {run.world_size} ranks" if run.missing else f"{run.world_size} ranks"
    many = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    now = "" if status is None else f'<span id="status" role="status">{status}</span>'
    return (
        f"<header><b>gradsync</b><span>{name(run.folder.name, 60)}</span><span>{ranks} on {many}</span>{now}</header>"
    )


def _blame(summary: Summary) -> str:
    said = [("bad", shown(blame.text), shown(blame.advice)) for blame in summary.blame]
    said += [("bad", shown(link.text), shown(link.advice)) for link in summary.links]
    return _list(said)


def _facts(summary: Summary) -> str:
    parts = [
        f'<div><dt>{shown(fact.name, 80)}</dt><dd class="value">{shown(fact.value, 120)}</dd>'
        f"<dd><small>{shown(fact.meaning)}</small></dd></div>"
        for fact in summary.facts
    ]
    return f'<dl class="facts">{"".join(parts)}</dl>' if parts else ""


def _warnings(summary: Summary) -> str:
    return _list([("warn", shown(warned.text), shown(warned.advice)) for warned in summary.warnings])


def _health(run: RunTrace, summary: Summary) -> str:
    """List what happened first on top, then each line as it was written."""
    said = []
    if (incident := first_event(run)) is not None:
        said.append(("bad", shown(incident.text, 1500), shown(incident.advice)))
    said += [("bad", _told(error), f"step {error.step}, {shown(error.what, 40)}") for error in summary.errors]
    said += [("warn", _told(line), f"step {line.step}, {shown(line.what, 40)}") for line in summary.health]
    return _list(said)


def _told(line: Health | Error) -> str:
    return shown(line.text) or shown(line.what, 80)


def _list(said: Sequence[tuple[str, str, str]]) -> str:
    """A list of (class, sentence, small print), its first lines."""
    items = [f'<li class="{kind}">{text}{_small(more)}</li>' for kind, text, more in said[:_MOST_LINES]]
    left_out = len(said) - len(items)
    if left_out:
        items.append(f"<li>{left_out:,} more are in the files.</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _small(text: str) -> str:
    return f"<small>{text}</small>" if text else ""


def _sentences(run: RunTrace, last: int) -> Iterator[str]:
    first = next(iter(run.ranks.values()))
    who = {"ddp": "DistributedDataParallel, looked on by gradsync"}.get(first.run.source, "gradsync")
    versions = [f"gradsync {shown(first.run.gradsync, 30)}"] * bool(first.run.gradsync)
    versions += [f"torch {shown(first.run.torch, 30)}"] * bool(first.run.torch)
    devices = sorted({trace.run.device for trace in run.ranks.values()})
    told = ", ".join(name(device, 40) for device in devices[:4]) + (" and others" if len(devices) > 4 else "")
    by = f"{who} ({', '.join(versions)})" if versions else who
    yield f"Synchronized by {by} on {told}; begun {show_time(first.run.started)}."
    most = max(len(trace.steps) for trace in run.ranks.values())
    detailed = max(sum(step.buckets is not None for step in trace.steps) for trace in run.ranks.values())
    yield f"{most:,} steps are looked at, {detailed:,} of them bucket by bucket."
    if most > last:
        yield f"Pictures show the last {last:,} of them."
    if run.missing:
        some = ", ".join(map(str, run.missing[:20]))
        yield f"Files of {len(run.missing)} ranks are not here: {some}{' …' if len(run.missing) > 20 else ''}."
    errors = [clock.error_s for trace in run.ranks.values() for clock in trace.clocks[-1:]]
    if errors and max(errors) > 0:
        yield f"Clocks of hosts are aligned to within {show_seconds(max(errors))}; lateness needs no alignment."
    if unreadable := sum(trace.num_unreadable for trace in run.ranks.values()):
        yield f"{unreadable:,} lines could not be read and are left out."
    yield (
        "A rank's lateness is how much longer than the others it worked, by its own clock, from the end of one "
        "synchronization until it had nothing left but to wait. Exposed is the time it then waited."
    )
