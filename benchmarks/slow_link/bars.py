"""A picture of step times: an arm per row, a rate per column. The dashed line is computation alone."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from slow_link.arms import ARMS, BASE
from slow_link.svg import number, page

# All in px.
_LEFT, _PANEL, _GAP, _TOP = 190, 300, 84, 66
_ROW, _BAR = 24, 15


def picture(steps: dict[str, Any]) -> str:
    """The whole SVG."""
    arms = [name for name in ARMS if any(name in facts["arms"] for facts in steps.values())]
    width, height = _LEFT + len(steps) * (_PANEL + _GAP), _TOP + _ROW * len(arms) + 16
    names = (f'<text class="y" x="{_LEFT - 10}" y="{_middle(i) + 4}">{name}</text>' for i, name in enumerate(arms))
    panels = (part for i, (rate, facts) in enumerate(steps.items()) for part in _panel(i, rate, facts["arms"], arms))
    return page(width, height, "time per training step, by arm and link", 16, [*names, *panels])


def _panel(column: int, rate: str, found: dict[str, Any], arms: list[str]) -> Iterator[str]:
    left = _LEFT + column * (_PANEL + _GAP)
    scale = _PANEL / max(median(arm["samples_s"]) for arm in found.values())
    yield f'<text x="{left}" y="{_TOP - 12}">{rate}</text>'
    for i, name in enumerate(arms):
        if name in found:
            yield from _bar(left, scale, i, name, found[name]["samples_s"])
    if BASE in found:
        x = left + scale * median(found[BASE]["samples_s"])
        foot = _TOP + _ROW * len(arms)
        yield f'<line class="floor" x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{foot}"/>'


def _bar(left: float, scale: float, row: int, name: str, samples: list[float]) -> Iterator[str]:
    """Of the median; the thin line is from quartile to quartile."""
    low, middle, high = quantiles(samples, n=4)
    y = _middle(row)
    yield (
        f'<rect class="f{number(name)}" x="{left}" y="{y - _BAR / 2}" width="{scale * middle:.1f}" height="{_BAR}">'
        f"<title>{name}: {_seconds(middle)}</title></rect>"
    )
    yield f'<line class="spread" x1="{left + scale * low:.1f}" y1="{y}" x2="{left + scale * high:.1f}" y2="{y}"/>'
    yield f'<text x="{left + scale * max(middle, high) + 8:.1f}" y="{y + 4}">{_seconds(middle)}</text>'


def _middle(row: int) -> float:
    return _TOP + _ROW * (row + 0.5)


def _seconds(seconds: float) -> str:
    """
    >>> _seconds(0.2741), _seconds(3.958)
    ('274 ms', '3.96 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
