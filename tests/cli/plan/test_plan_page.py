"""`gradsync plan --html`: one page that needs nothing else, and that no name can break."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import gradsync as gs
from gradsync.cli.main import main
from gradsync.cli.plan.answer import Answer, answer
from gradsync.cli.plan.plan_page import ChartMark, Line, draw_chart, page
from gradsync.cli.plan.step_picture import draw_timeline
from gradsync.cli.plan.sweep import Axis, sweep
from gradsync.cluster import Cluster, Link
from gradsync.planner.predict import predict
from gradsync.planner.profile import Gradient, ModelProfile

HOSTILE = "</title><script>alert('ä')</script>\"'&<b>"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def ask(name: str = "a model") -> Answer:
    gradients = tuple(Gradient(f"{name}.{i}", (500, 500), torch.float32, 1e-2 * (i + 1)) for i in range(20))
    profile = ModelProfile(gradients, 0.1, 0.2, 0.01, tokens=1000, name=name)
    wire = Link(20e-6, 20e6)
    return answer(profile, Cluster(((0,), (1,)), wire, wire, name=name))


@pytest.fixture(scope="module")
def asked() -> Answer:
    return ask()


@pytest.fixture(scope="module")
def whole(asked: Answer) -> str:
    axis = Axis("bandwidth", 5e6, 80e6)
    return page(asked, ["a < b"], [(axis, sweep(axis, asked, "lossy"))], 'kind = "every_step"')


def test_the_page_is_html_and_needs_nothing_else(whole: str) -> None:
    reader = read(whole)
    assert whole.startswith("<!DOCTYPE html>")
    names = [tag for tag, _ in reader.tags]
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(names)
    assert not any(name in ("src", "href", "action") or name.startswith("on") for _, a in reader.tags for name in a)
    assert "http" not in whole
    assert "url(" not in whole
    assert "@import" not in whole


def test_it_suits_phones_and_dark_rooms(whole: str) -> None:
    assert 'name="viewport" content="width=device-width' in whole
    assert "prefers-color-scheme: dark" in whole
    assert "overflow-x: auto" in whole


def test_it_shows_both_timelines_the_chart_and_every_candidate(asked: Answer, whole: str) -> None:
    reader = read(whole)
    pictures = [attributes["class"] for tag, attributes in reader.tags if tag == "svg"]
    assert pictures == ["timeline", "timeline", "chart"]
    assert "From the catalogue, not validated" in "".join(reader.text)
    assert len(re.findall(r"<tr( class=\"chosen\")?><td>", whole)) == len(asked.candidates)
    assert whole.count('class="chosen"') == 1


def test_hostile_names_stay_text() -> None:
    asked = ask(HOSTILE)
    axis = Axis("bandwidth", 20e6, 40e6)
    text = page(asked, [HOSTILE], [(axis, sweep(axis, asked, "lossy"))], HOSTILE)
    reader = read(text)
    assert "<script" not in text
    assert not any(tag in ("script", "b") for tag, _ in reader.tags)
    assert "".join(reader.text).count(HOSTILE) >= 4


def test_hostile_labels_stay_text_in_pictures(asked: Answer) -> None:
    hostile = tuple(span._replace(label=HOSTILE) for span in asked.usual.timeline)
    for drawn in (
        draw_timeline(replace(asked.usual, timeline=hostile), 1.0),
        draw_chart([Line(HOSTILE, ((1.0, 0.5), (2.0, 0.25)))], [(1.0, HOSTILE)], ChartMark(1.0, HOSTILE)),
    ):
        assert not any(tag in ("script", "b") for tag, _ in read(drawn).tags)


def test_a_timeline_marks_what_is_exposed_and_fits_its_picture(asked: Answer) -> None:
    reader = read(draw_timeline(asked.usual, max(span.stop_s for span in asked.usual.timeline)))
    bars = [attributes for tag, attributes in reader.tags if tag == "rect"]
    assert any("exposed" in str(bar["class"]) for bar in bars)
    assert {str(bar["class"]).split()[0] for bar in bars} == {"compute", "wire"}
    width = float(str(reader.tags[0][1]["viewbox"]).split()[2])
    assert all(float(str(bar["x"])) + float(str(bar["width"])) <= width for bar in bars)
    assert "".join(reader.text).count("backward:") == 1  # in one piece, though it was simulated bucket by bucket


def test_a_plan_that_packs_has_a_third_track(asked: Answer) -> None:
    packed = predict(asked.profile, asked.cluster, gs.Plan(compress=gs.int8()))
    reader = read(draw_timeline(packed, packed.step_s))
    assert {str(a["class"]).split()[0] for tag, a in reader.tags if tag == "rect"} == {"compute", "codec", "wire"}


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    small = ["--gpus", "16", "--network", "100g", "--params", "1e7", "--tokens", "512"]
    assert main(["plan", *small, "--html", str(path)]) == 0
    first = path.read_text(encoding="utf-8")
    read(first)
    assert first.count('class="chart"') == 1
    assert main(["plan", *small, "--html", str(path), "--sweep", "gpus=1024..4096"]) == 0  # its own it may replace
    second = path.read_text(encoding="utf-8")
    assert second.count('class="chart"') == 2
    assert "An extrapolation" in second
    capsys.readouterr()


def test_one_rank_has_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    assert main(["plan", "--gpus", "1", "--params", "1e7", "--html", str(path)]) == 0
    read(path.read_text(encoding="utf-8"))
    capsys.readouterr()
