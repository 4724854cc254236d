"""One step of a plan as a picture: what computes, what packs, what travels, and where computation waited.

compute  ▓ forward ▓▓▓ backward ▓▓▓▓▓▓▓▓▓▓▓▓      ▓ optimizer
codec            ▒    ▒    ▒    ▒
wire               ░░░░ ░░░░ ░░░░ ░░░░████████    █ exposed: computation waits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gradsync import svg
from gradsync.planner.prediction import Prediction, StepSpan
from gradsync.units import show_seconds

# All in px.
_WIDTH, _LEFT, _RIGHT = 860, 74, 12
_TOP, _ROW, _BAR = 8, 34, 24
_LETTER = 7  # of a label, about

_TRACKS = ("compute", "codec", "wire")


def draw_timeline(prediction: Prediction, until_s: float) -> str:
    """An SVG of the step, on an axis from 0 to `until_s`: pictures below each other share it."""
    used = [track for track in _TRACKS if any(span.track == track for span in prediction.timeline)]
    foot = _TOP + _ROW * len(used)
    parts = [svg.text("y", _LEFT - 8, _TOP + _ROW * row + 17, track) for row, track in enumerate(used)]
    for span in _joined(prediction.timeline):
        parts += _bar(span, _TOP + _ROW * used.index(span.track), until_s)
    return svg.figure("timeline", _WIDTH, foot + 26, "timeline of a step", [*parts, *_axis(foot, until_s)])


def _joined(spans: Sequence[StepSpan]) -> list[StepSpan]:
    """Join into one what goes on without a pause: backward is simulated from bucket to bucket."""
    joined: dict[str, list[StepSpan]] = {track: [] for track in _TRACKS}
    for span in spans:
        row = joined[span.track]
        if row and row[-1].label == span.label and row[-1].exposed == span.exposed and row[-1].stop_s >= span.start_s:
            row[-1] = row[-1]._replace(stop_s=max(row[-1].stop_s, span.stop_s))
        else:
            row.append(span)
    return [span for row in joined.values() for span in row]


def _bar(span: StepSpan, y: float, until_s: float) -> Iterator[str]:
    left, right = _x(span.start_s, until_s), _x(span.stop_s, until_s)
    width = max(0.6, right - left)
    kind = f"{span.track}{' exposed' if span.exposed else ''}"
    waits = ", computation waits" if span.exposed else ""
    label = escape(span.label)
    says = f"{label}: {show_seconds(span.start_s)} to {show_seconds(span.stop_s)}{waits}"
    yield svg.rect(kind, left, y, width, _BAR, says)
    if width > _LETTER * len(span.label) + 6:
        yield svg.text("x inside", left + width / 2, y + 16, label)


def _axis(foot: float, until_s: float) -> Iterator[str]:
    yield svg.line("grid", _LEFT, foot, _WIDTH - _RIGHT, foot)
    for part in range(5):
        at = until_s * part / 4
        yield svg.text("x", _x(at, until_s), foot + 18, show_seconds(at) if part else "0")


def _x(at_s: float, until_s: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT - 20) * (at_s / until_s if until_s > 0 else 0.0)
