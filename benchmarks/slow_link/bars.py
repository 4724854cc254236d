"""A picture of step times: an arm per row, a rate per column. The dashed line is computation alone."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from gradsync import svg
from slow_link.variant_colors import number, page
from slow_link.variants import BASE, VARIANTS

# All in px.
_LEFT, _PANEL, _GAP, _TOP = 190, 300, 84, 66
_ROW, _BAR = 24, 15


def picture(steps: dict[str, Any]) -> str:
    """The whole SVG."""
    arms = [name for name in VARIANTS if any(name in facts["arms"] for facts in steps.values())]
    width, height = _LEFT + len(steps) * (_PANEL + _GAP), _TOP + _ROW * len(arms) + 16
    names = (svg.text("y", _LEFT - 10, _middle(i) + 4, name) for i, name in enumerate(arms))
    panels = (part for i, (rate, facts) in enumerate(steps.items()) for part in _panel(i, rate, facts["arms"], arms))
    return page(width, height, "time per training step, by arm and link", [*names, *panels])


def _panel(column: int, rate: str, found: dict[str, Any], arms: list[str]) -> Iterator[str]:
    left = _LEFT + column * (_PANEL + _GAP)
    scale = _PANEL / max(median(arm["samples_s"]) for arm in found.values())
    yield svg.text("", left, _TOP - 12, rate)
    for i, name in enumerate(arms):
        if name in found:
            yield from _bar(left, scale, i, name, found[name]["samples_s"])
    if BASE in found:
        x = left + scale * median(found[BASE]["samples_s"])
        foot = _TOP + _ROW * len(arms)
        yield svg.line("floor", x, _TOP - 4, x, foot)


def _bar(left: float, scale: float, row: int, name: str, samples: list[float]) -> Iterator[str]:
    """The bar of the median; the thin line is from quartile to quartile."""
    low, middle, high = quantiles(samples, n=4)
    y = _middle(row)
    yield svg.rect(f"f{number(name)}", left, y - _BAR / 2, scale * middle, _BAR, f"{name}: {_seconds(middle)}")
    yield svg.line("spread", left + scale * low, y, left + scale * high, y)
    yield svg.text("", left + scale * max(middle, high) + 8, y + 4, _seconds(middle))


def _middle(row: int) -> float:
    return _TOP + _ROW * (row + 0.5)


def _seconds(seconds: float) -> str:
    """
    >>> _seconds(0.2741), _seconds(3.958)
    ('274 ms', '3.96 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
