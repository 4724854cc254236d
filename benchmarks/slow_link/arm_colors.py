"""What the pictures share: a page that is light or dark as its reader is, and a color for every arm."""

from __future__ import annotations

from collections.abc import Iterable

from gradsync import svg
from slow_link.arms import ARMS, WARM_UP

# 24 arms, without those that have a warm-up: the families by hue, so that neighbours in the key differ.
_COLORS = (
    ("#777777", "#aaaaaa"),
    ("#c62828", "#ef9a9a"),
    ("#ad1457", "#f48fb1"),
    ("#c75b00", "#ffb74d"),
    ("#6d4c41", "#bcaaa4"),
    ("#e53935", "#ff8a80"),
    ("#1565c0", "#64b5f6"),
    ("#5e35b1", "#b39ddb"),
    ("#00838f", "#4dd0e1"),
    ("#0277bd", "#81d4fa"),
    ("#2e7d32", "#81c784"),
    ("#827717", "#dce775"),
    ("#3949ab", "#9fa8da"),
    ("#8e24aa", "#ce93d8"),
    ("#00695c", "#80cbc4"),
    ("#ef6c00", "#ffcc80"),
    ("#455a64", "#b0bec5"),
    ("#d81b60", "#f06292"),
    ("#4e342e", "#d7ccc8"),
    ("#b71c1c", "#ffab91"),
    ("#111111", "#eeeeee"),
    ("#558b2f", "#aed581"),
    ("#6a1b9a", "#ba68c8"),
    ("#37474f", "#90a4ae"),
)
_STYLE = """
.floor { stroke: #777; stroke-width: 1.5; stroke-dasharray: 6 4 } .spread { stroke: #333 }
.warm { stroke-dasharray: 6 3 }"""
_DARK_STYLE = ".floor { stroke: #aaa } .spread { stroke: #d5dae2 }"


def page(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole SVG that needs nothing else."""
    return svg.chart(width, height, [svg.text("title", 16, 26, title), *parts], _COLORS, _STYLE, _DARK_STYLE)


def number(arm: str) -> int:
    """The number of its color, in every picture and also with a warm-up: `s3` as a line, `f3` as an area."""
    return list(ARMS).index(arm.removesuffix(WARM_UP)) % len(_COLORS)


def line(arm: str) -> str:
    """The classes of its line; with a warm-up it is dashed."""
    return f"series s{number(arm)}{' warm' if arm.endswith(WARM_UP) else ''}"
