"""The answer as one page of HTML that needs nothing else: no network, no script.

Names come from files that anybody may have written, so every text goes through `escape`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gradsync import svg
from gradsync.cli.plan.answer import Answer, saving
from gradsync.cli.plan.candidate_rows import footnote, groups
from gradsync.cli.plan.figures import show_interval, show_ms, show_saving, show_share
from gradsync.cli.plan.one_line import in_one_line
from gradsync.cli.plan.step_picture import draw_timeline
from gradsync.cli.plan.sweep import Axis, SweepPoint
from gradsync.cli.plan.text import EXTRAPOLATION, assumptions, calibration, show_value
from gradsync.cli.plan.what_if import narrow_link
from gradsync.planner.prediction import Prediction
from gradsync.planner.snippet import as_python, in_words
from gradsync.units import show_nbytes

# All in px.
_WIDTH, _HEIGHT = 860, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 24, 14, 44
_KEY = 20  # a line of the key
Swept = tuple[Axis, Sequence[SweepPoint]]

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --page: #fff; --pale: #667; --line: #dfe3ea; --good: #e8f1fb;
  --compute: #90a4ae; --codec: #c9a227; --wire: #1565c0; --exposed: #d84315; --c0: #1565c0;
  --c1: #2e7d32; --c2: #c75b00 }
@media (prefers-color-scheme: dark) { :root { --ink: #d9dee6; --page: #14171c; --pale: #98a2b3; --line: #2c323b;
  --good: #1c2a3a; --compute: #546e7a; --codec: #e0c050; --wire: #64b5f6; --exposed: #ff8a65; --c0: #64b5f6;
  --c1: #81c784; --c2: #ffb74d } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem;
  margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem; line-height: 1.3 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.pale, small { color: var(--pale) } .wide { overflow-x: auto } svg { width: 100%; min-width: 34rem; height: auto }
table { border-collapse: collapse; width: 100%; font-size: .9rem } th, td { padding: .35rem .5rem; text-align: right;
  border-bottom: 1px solid var(--line); vertical-align: top } th:first-child, td:first-child { text-align: left;
  min-width: 14rem } tr.chosen { background: var(--good) } td small { display: block }
pre { background: var(--good); padding: .75rem; overflow-x: auto; font-size: .85rem }
text { font: 12px sans-serif; fill: var(--ink) } .x { text-anchor: middle } .y { text-anchor: end }
.inside { fill: #fff } .grid { stroke: var(--line) } .mark { stroke: var(--pale); stroke-dasharray: 5 4 }
.compute { fill: var(--compute) } .codec { fill: var(--codec) } .wire { fill: var(--wire) }
rect.exposed { fill: var(--exposed) } .series { fill: none; stroke-width: 2 }
""" + "".join(f".s{i} {{ stroke: var(--c{i}) }} .f{i} {{ fill: var(--c{i}) }}\n" for i in range(3))


def page(answer: Answer, changes: Sequence[str], swept: Sequence[Swept], plan_toml: str) -> str:
    """The whole page; a chart for each that was swept."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>gradsync plan: {escape(answer.cluster.name or 'cluster')}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(in_one_line(answer))}</h1>",
        f'<p class="pale">{escape(calibration(answer))}</p>',
        *_paragraphs(assumptions(answer)),
        *_timelines(answer),
        *(line for axis, points in swept for line in _chart(answer, axis, points)),
        *_candidates(answer),
        *_list("What would change the answer", changes),
        "<h2>To use it</h2>",
        f"<pre>import gradsync as gs\n\ngs.attach(model, optimizer, {escape(as_python(answer.chosen.plan))})</pre>",
        f"<p>or as <code>plan.toml</code>, for <code>gs.Plan.load</code>:</p><pre>{escape(plan_toml)}</pre>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _paragraphs(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield f"<p>{escape(text)}</p>"


def _timelines(answer: Answer) -> Iterator[str]:
    """The chosen plan's step, and the default's below it on the same axis."""
    shown = {"The plan": answer.chosen, "The default": answer.usual}
    if answer.chosen is answer.usual:
        shown = {"The plan, which is the default": answer.usual}
    until_s = max((span.stop_s for it in shown.values() for span in it.timeline), default=0.0)
    if until_s <= 0:
        return
    yield "<h2>A step</h2>"
    for title, prediction in shown.items():
        name = f"{title}: {in_words(prediction.plan)}, {show_ms(prediction.step_s)} ms"
        yield f"<p>{escape(name)}</p>"
        if prediction.timeline:
            yield f'<div class="wide">{draw_timeline(prediction, until_s)}</div>'
    yield '<p class="pale">What is red is exposed: computation waits meanwhile.</p>'


def _chart(answer: Answer, axis: Axis, points: Sequence[SweepPoint]) -> Iterator[str]:
    yield f"<h2>Overhead by {axis.what}</h2>"
    lines = [
        Line("default: exact, overlapped with backward", tuple((it.value, it.usual.overhead) for it in points)),
        Line("best that trains the same", tuple((it.value, it.same.overhead) for it in points)),
        Line("fastest lossy", tuple((it.value, it.lossy.overhead) for it in points if it.lossy is not None)),
    ]
    labels = [(it.value, show_value(axis, it.value)) for it in points]
    drawn = draw_chart([line for line in lines if line.points], labels, ChartMark(_now(answer, axis), "now"))
    yield f'<div class="wide">{drawn}</div>'
    if any(it.extrapolated for it in points):
        yield f'<p class="pale">{escape(EXTRAPOLATION)}.</p>'


def _now(answer: Answer, axis: Axis) -> float:
    """The value on the axis that the question has now."""
    if axis.what == "gpus":
        return answer.cluster.world_size
    return answer.profile.tokens if axis.what == "tokens" else narrow_link(answer.cluster).bandwidth / answer.arrives


def _candidates(answer: Answer) -> Iterator[str]:
    yield '<h2>Candidates</h2><div class="wide"><table><thead><tr>'
    heads = ("plan", "step ms", "nine in ten", "overhead", "exposed ms", "sent", "memory", "saves")
    yield "".join(f"<th>{head}</th>" for head in heads) + "</tr></thead><tbody>"
    for title, group in groups(answer):
        yield f'<tr><th colspan="{len(heads)}">{escape(title)}</th></tr>'
        for candidate in group:
            yield _row(candidate, answer)
    yield f"</tbody></table></div><p><small>{escape(footnote())}</small></p>"


def _row(candidate: Prediction, answer: Answer) -> str:
    name = escape(in_words(candidate.plan)) + (" (the default)" if candidate is answer.usual else "")
    cells = [
        f"{name}<small>{escape(candidate.reason)}</small>",
        show_ms(candidate.step_s),
        show_interval(candidate.low_s, candidate.high_s),
        show_share(candidate.overhead),
        show_ms(candidate.exposed_s),
        show_nbytes(candidate.nbytes),
        show_nbytes(candidate.memory_nbytes),
        "" if candidate is answer.chosen else show_saving(saving(candidate, answer.chosen)),
    ]
    chosen = ' class="chosen"' if candidate is answer.chosen else ""
    return f"<tr{chosen}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _list(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield f"<h2>{escape(title)}</h2><ul>"
        yield from (f"<li>{escape(text)}</li>" for text in texts)
        yield "</ul>"


@dataclass(frozen=True)
class Line:
    """A name and (x, overhead) by rising x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ChartMark:
    """A place on the axis that is worth a name: today's network."""

    at: float
    name: str


def draw_chart(lines: Sequence[Line], labels: Sequence[tuple[float, str]], mark: ChartMark | None = None) -> str:
    """An SVG: x logarithmic with these labels, y from 0 to 100 % of the step."""
    ends = [x for line in lines for x, _ in line.points]
    plot = svg.Plot(_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM, min(ends), max(ends))
    shares = [(_y(plot, percent / 100), f"{percent} %") for percent in (0, 25, 50, 75, 100)]
    parts = [*plot.grid(shares, [(value, escape(label)) for value, label in labels])]
    if mark is not None and plot.low <= mark.at <= plot.high:
        x = plot.x(mark.at)
        parts += [svg.line("mark", x, _TOP, x, plot.foot), svg.text("x", x, _TOP - 2, escape(mark.name))]
    for number, line in enumerate(lines):
        parts += _line(plot, number, line)
        y = _HEIGHT + _KEY * number
        parts.append(svg.path(f"series s{number}", [(_LEFT, y), (_LEFT + 28, y)]))
        parts.append(svg.text("", _LEFT + 36, y + 4, escape(line.name)))
    return svg.figure("chart", _WIDTH, _HEIGHT + _KEY * len(lines), "overhead by size", parts)


def _y(plot: svg.Plot, share: float) -> float:
    return plot.top + plot.height * (1 - min(1.0, max(0.0, share)))


def _line(plot: svg.Plot, number: int, line: Line) -> Iterator[str]:
    points = [(plot.x(x), _y(plot, share)) for x, share in line.points]
    yield svg.path(f"series s{number}", points)
    for (x, y), (_, share) in zip(points, line.points, strict=True):
        yield svg.circle(f"f{number}", x, y, escape(f"{line.name}: {show_share(share)}"))
