"""Pictures are written in one place, so that all look and read alike."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import gradsync
from gradsync import svg

SOURCE = Path(gradsync.__file__).parent
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SHAPES = re.compile(r"<(svg|rect|circle|line|path|text|marker)\b")


def test_nobody_else_writes_svg() -> None:
    files = [*SOURCE.rglob("*.py"), *BENCHMARKS.rglob("*.py")]
    found = [path.name for path in files if path.name != "svg.py" and SHAPES.search(path.read_text())]
    assert not found, "draw with gradsync.svg"


def test_a_chart_is_a_document_with_colours_for_light_and_dark() -> None:
    chart = svg.chart(100, 50.25, [svg.line("s0", 0, 0, 1, 1)], [("#111", "#eee"), ("#222", "#ddd")], ".a {}", ".b {}")
    root = ElementTree.fromstring(chart)
    assert root.attrib == {"viewBox": "0 0 100 50.2", "width": "100", "height": "50.2"}
    style = next(root.iter("{http://www.w3.org/2000/svg}style")).text or ""
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    assert ".s1 { stroke: #222 } .f1 { fill: #222 }" in light
    assert ".s1 { stroke: #ddd } .f1 { fill: #ddd }" in dark
    assert (".a {}" in light, ".b {}" in dark) == (True, True)


def test_labels_of_a_plot_that_would_cover_another_are_left_out() -> None:
    plot = svg.Plot(0, 0, 100, 50, low=1, high=100)
    columns = [(1.0, "first"), (1.1, "hidden"), (100.0, "last")]
    parts = [*plot.grid([(10, "row")], columns)]
    assert sum(part.startswith("<line") for part in parts) == 1 + 3
    assert [part for part in parts if "hidden" in part] == []
    assert '<text class="x" x="100" y="68">last</text>' in parts
