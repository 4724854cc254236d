"""The report's page: whole by itself, in order, small, and safe against every name in the run."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradsync.report.page import page, sections
from gradsync.report.summary import summarize
from gradsync.trace.lines import BucketTimes, Error, Health, StepPart
from gradsync.trace.reader import RunTrace, read_run
from hostile_names import HOSTILE, hostile_folder, hostile_run
from made_runs import made_run, write_run

VOID = {"meta", "link"}
EXPECTED_TAGS = {
    "html", "head", "meta", "link", "title", "style", "body", "header", "main", "section", "h1", "h2", "p", "b", "bdi",
    "span", "small", "ul", "li", "dl", "dt", "dd", "div", "svg", "rect", "line", "path", "text", "table", "thead",
    "tbody", "tr", "th", "td",
}  # fmt: skip


class Parsed(HTMLParser):
    """Checks that tags close in order, and keeps what it saw."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

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


def drawn(run: RunTrace) -> str:
    return page(run, summarize(run))


def test_page_says_first_who_is_to_blame_and_last_how_it_was_measured() -> None:
    run = made_run(
        steps=80, slow={1: {"input": 0.05}}, stats={"staleness_histogram_1": 3}, ratio=4.0,
        health=(Health(9, "nonfinite", [2], "w", 3, "rank 2 had NaN in w"),),
    )  # fmt: skip
    html = drawn(run)
    order = re.findall(r'<section id="(\w+)">', html)
    assert order == [
        "verdict", "blame", "facts", "warnings", "timeline", "overhead", "lateness", "parameters", "staleness",
        "health", "measured",
    ]  # fmt: skip
    blame = html[html.index('id="blame"') : html.index('id="facts"')]
    assert "rank 1" in blame
    assert "input" in blame
    assert "rank 2 had NaN in w" in html


def test_page_needs_nothing_but_itself() -> None:
    parsed = Parsed(drawn(made_run(steps=30)))
    for tag, attributes in parsed.tags:
        assert tag in EXPECTED_TAGS | {"title"}
        assert not any(name.startswith("on") or name in ("src", "style", "action") for name in attributes)
        assert attributes.get("href", "data:,") == "data:,"
    html = drawn(made_run(steps=30))
    assert not re.search(r"@import|url\(|https?://", html)


def test_page_forbids_scripts_by_its_own_policy() -> None:
    html = drawn(made_run(steps=3))
    assert "default-src 'none'" in html
    assert "script" not in html.partition("</head>")[0].replace("description", "")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_name_becomes_a_tag_or_an_attribute_or_leaves_its_place(text: str) -> None:
    html = drawn(hostile_run(text))
    parsed = Parsed(html)
    assert {tag for tag, _ in parsed.tags} <= EXPECTED_TAGS
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert len(html.encode("utf-8")) < 1_000_000
    assert all(letter.isprintable() or letter == "\n" for letter in html)


def test_hostile_names_survive_a_file_and_are_still_only_names(tmp_path: Path) -> None:
    run = read_run(hostile_folder(tmp_path / "run", HOSTILE[0]))
    html = drawn(run)
    assert "&lt;img src=x onerror=alert(1)&gt;" in html
    assert "<img" not in html


def test_page_of_many_ranks_buckets_and_parameters_is_small_and_says_what_it_leaves_out() -> None:
    run = made_run(ranks=64, steps=4)
    many = [(f"layers.{index}.weight", (4, 4), "float32") for index in range(5000)]
    for trace in run.ranks.values():
        trace.run = replace(trace.run, parameters=many)
        buckets = [BucketTimes(n, 0.01, 0.01, 0.01, 0.03 + n / 1e5, None, None, 9, 0.0, 0.0) for n in range(2000)]
        late = 0.02 * (trace.run.rank % 7)
        phases = [StepPart("forward", 0.0, 0.02 + late), StepPart("wait", 0.02 + late, 0.16)]
        trace.steps = [
            replace(trace.steps[-1], step=step, phases=phases, buckets=buckets if step == 120 else None)
            for step in range(1, 121)
        ]
        trace.errors = [Error(step, "PeerLost", [1], 0, "gone " * 60) for step in range(400)]
    html = page(run, replace(summarize(made_run(steps=4)), errors=run.ranks[0].errors))
    assert len(html) < 1_000_000
    for said in (
        "Of 64 ranks these 8 are shown", "2000 buckets of a rank are drawn in groups of", "4,960 smaller ones together",
        "Of 64 ranks the 40 latest are shown", "more are in the files",
    ):  # fmt: skip
        assert said in html


def test_page_of_many_steps_is_small_and_says_what_it_leaves_out() -> None:
    run = made_run(ranks=4, steps=20, slow={1: {"input": 0.05}})
    for trace in run.ranks.values():
        trace.steps = [replace(trace.steps[step % 19 + 1], step=step) for step in range(1, 5_201)]
    html = page(run, summarize(made_run(steps=4)))
    assert len(html) < 300_000
    for said in ("Pictures show the last 5,000", "stands for up to 32 steps", "mean of up to 50 steps"):
        assert said in html


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_page_of_a_run_that_hardly_began_is_a_page(ranks: int, steps: int) -> None:
    parsed = Parsed(drawn(made_run(ranks, steps)))
    assert any(tag == "h1" for tag, _ in parsed.tags)


def test_page_of_a_file_with_absurd_numbers_is_a_page(tmp_path: Path) -> None:
    run = made_run(ranks=2, steps=3)
    for trace in run.ranks.values():
        phases = [StepPart("forward", -1e17, 1e17), StepPart("wait", 5.0, -5.0)]
        trace.steps = [replace(step, phases=phases, step_s=1e-300, exposed_s=-1.0) for step in trace.steps]
        trace.run = replace(trace.run, started=1e18, parameters=[("w", (-1, 2**62), "?")])
    Parsed(drawn(read_run(write_run(tmp_path / "run", run))))


def test_live_parts_are_the_sections_of_the_page() -> None:
    run = made_run(steps=20)
    summary = summarize(run)
    html = page(run, summary, live=True)
    for key, part in sections(run, summary, live=True).items():
        assert f'<section id="{key}">{part}</section>' in html
    assert '<script src="/watch.js" defer></script>' in html
