"""Both drawings hold every transfer, and nothing but digits of ours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playback import RECIPES, host_lists

from gradsync.algorithms.draw import draw
from gradsync.algorithms.hierarchical import hierarchical
from gradsync.algorithms.ring import ring
from gradsync.algorithms.schedule import Schedule, Transfer

SVG = "{http://www.w3.org/2000/svg}"
any_schedule = st.builds(lambda recipe, hosts: recipe.schedule(hosts), st.sampled_from(RECIPES), host_lists(24))


@settings(max_examples=25, deadline=None)
@given(schedule=any_schedule)
def test_the_text_shows_every_transfer(schedule: Schedule) -> None:
    _, *lines = draw(schedule).splitlines()
    assert len(lines) == len(schedule.rounds)
    for number, (line, transfers) in enumerate(zip(lines, schedule.rounds, strict=True), 1):
        assert re.match(rf"round +{number}  ", line)
        shown = re.findall(r"(\d+)→(\d+) ([+=])([\d,-]+)", line)
        read = [t for src, dst, sign, chunks in shown for t in _transfers(src, dst, chunks, sign == "+")]
        assert Counter(read) == Counter(transfers)


@settings(max_examples=25, deadline=None)
@given(schedule=any_schedule)
def test_the_svg_is_valid_xml_and_shows_every_transfer(schedule: Schedule) -> None:
    root = ET.fromstring(draw(schedule, "svg"))
    read = [
        (int(path.attrib["data-round"]), transfer)
        for path in root.iter(f"{SVG}path")
        if "data-round" in path.attrib
        for transfer in _transfers(
            path.attrib["data-src"], path.attrib["data-dst"], path.attrib["data-chunks"], path.attrib["class"] == "add"
        )
    ]
    assert Counter(read) == Counter((n, t) for n, transfers in enumerate(schedule.rounds, 1) for t in transfers)


@settings(max_examples=10, deadline=None)
@given(schedule=any_schedule)
def test_no_label_covers_another_and_none_leaves_the_sheet(schedule: Schedule) -> None:
    root = ET.fromstring(draw(schedule, "svg"))
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    feet: dict[float, list[float]] = {}
    for text in root.iter(f"{SVG}text"):
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        assert 0 <= x <= width
        assert 0 <= y <= height
        if text.attrib.get("class", "").endswith("-label"):
            feet.setdefault(x, []).append(y)
    for column in feet.values():
        column.sort()
        assert all(below - above >= 11 for above, below in pairwise(column))


def test_every_arrow_begins_at_its_sender_and_ends_at_its_receiver() -> None:
    root = ET.fromstring(draw(ring().schedule(8), "svg"))
    lines = [float(line.attrib["y1"]) for line in root.iter(f"{SVG}line")]
    for path in root.iter(f"{SVG}path"):
        if "data-round" in path.attrib:
            _, y1, _, y2 = map(float, re.findall(r"[\d.]+", path.attrib["d"]))
            assert (y1, y2) == (lines[int(path.attrib["data-src"])], lines[int(path.attrib["data-dst"])])


def test_long_lists_of_chunks_are_shortened_on_the_sheet_and_whole_on_hover() -> None:
    schedule = hierarchical().schedule([range(1), range(1, 3), range(3, 10)])
    root = ET.fromstring(draw(schedule, "svg"))
    assert any((text.text or "").endswith("…") for text in root.iter(f"{SVG}text"))
    assert not any("…" in (title.text or "") for title in root.iter(f"{SVG}title"))


def test_one_rank_can_be_drawn() -> None:
    assert draw(ring().schedule(1)) == "1 rank, 1 chunk, 0 rounds; +c: add chunk c, =c: replace it"
    ET.fromstring(draw(ring().schedule(1), "svg"))


class Hostile(int):
    def __str__(self) -> str:
        return "<script>"

    __repr__ = __str__
    __format__ = lambda self, spec: "<script>"  # noqa: E731


@pytest.mark.parametrize("name", ["src", "dst", "chunk", "add"])
@pytest.mark.parametrize("value", ["<script>", Hostile(0), None, 0.0])
def test_a_name_that_is_no_number_never_gets_as_far_as_a_drawing(name: str, value: object) -> None:
    fields = {"src": 0, "dst": 1, "chunk": 0, "add": True} | {name: value}
    with pytest.raises(ValueError, match="is no transfer between two of 2 ranks"):
        Schedule(2, 1, ((Transfer(**fields),),))  # type: ignore[arg-type]


def test_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match='form must be "text" or "svg", got \'png\''):
        draw(ring().schedule(2), "png")  # type: ignore[arg-type]


def _transfers(src: str, dst: str, chunks: str, add: bool) -> list[Transfer]:
    listed = []
    for run in chunks.split(","):
        low, _, high = run.partition("-")
        listed += [Transfer(int(src), int(dst), chunk, add) for chunk in range(int(low), int(high or low) + 1)]
    return listed
