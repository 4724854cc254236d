"""The site builds without a warning, needs no other host, and has every page, name, command and picture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from doc_pages import DOCS, PAGES, ROOT, read

import gradsync as gs
from gradsync.cli import main

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None,
    reason="the site needs pip install 'gradsync[docs]'",
)
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


class Tags(HTMLParser):
    """What a page loads, leads to, and where one can be led to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value for name, value in attrs if value is not None}
        if (address := told.get(LOADS.get(tag, ""))) is not None:
            self.loads.append(address)
        if tag == "a" and "href" in told:
            self.leads.append(told["href"])
        if "id" in told:
            self.ids.append(told["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=110)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Tags]:
    return {path: Tags(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Tags]) -> None:
    outside = {
        (path.name, address) for path, tags in pages.items() for address in tags.loads if urlsplit(address).netloc
    }
    assert outside == set()
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import\s*)[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Tags]) -> None:
    for path, tags in pages.items():
        for address in {*tags.leads, *tags.loads}:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), f"{path.relative_to(site)} leads to {address}"
            if parts.fragment and there in pages:
                assert unquote(parts.fragment) in [*pages[there].ids, "__top"], f"{path.relative_to(site)}: {address}"


def test_a_link_to_what_the_repository_does_not_have_fails_a_strict_build(caplog: pytest.LogCaptureFixture) -> None:
    hooks = run_path(str(DOCS / "hooks.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="ddp.md", generated_by=None))
    text = "[examples](../examples) [one](../examples/lightning_train.py) [gone](../examples/gone.py)"
    led = hooks["on_page_markdown"](text, page, None, None)
    assert led == "examples [one](examples/lightning_train.py.md) gone"
    (record,) = caplog.records  # strict counts warnings of mkdocs' own loggers
    assert (record.levelname, record.name.partition(".")[0]) == ("WARNING", "mkdocs")
    assert "docs/ddp.md leads to ../examples/gone.py" in record.getMessage()


def test_every_page_is_there_and_can_be_searched_for(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    written = {Path(page).relative_to("docs").with_suffix(".html").as_posix() for page in PAGES if page != "README.md"}
    assert written - found - {"index.html"} == set()
    assert "gossip" in json.dumps(index)


def test_the_reference_has_every_public_name_once(pages: dict[Path, Tags]) -> None:
    told = [name for page in PAGES for name in re.findall(r"^::: gradsync\.(\w+)$", read(page), re.MULTILINE)]
    assert sorted(told) == sorted(gs.__all__)
    ids = {name for tags in pages.values() for name in tags.ids}
    assert {f"gradsync.{name}" for name in gs.__all__} <= ids
    assert {"gradsync.GradSync.stats", "gradsync.Plan.load"} <= ids


def test_examples_of_docstrings_are_shown_as_code(site: Path) -> None:
    text = (site / "reference" / "plans.html").read_text(encoding="utf-8")
    assert "language-pycon" in text
    assert "<blockquote>" not in text


def test_the_page_of_commands_has_each_commands_options(site: Path) -> None:
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for command in main._COMMANDS:
        assert f"usage: gradsync {command}" in text
    assert all(option in text for option in ("--slow-link", "--token-file", "--perfetto", "--brief", "--sweep"))


def test_every_picture_is_shown() -> None:
    text = "".join(read(page) for page in PAGES)
    assert [path.name for path in (DOCS / "images").iterdir() if f"images/{path.name}" not in text] == []


def test_links_of_the_readme_hold() -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)#]+)", read("README.md")):
        assert (ROOT / target).exists(), target
