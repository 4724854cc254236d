"""Pages name files that exist."""

from __future__ import annotations

import re

import pytest
from doc_pages import PAGES, ROOT, read

PATH = re.compile(r"(?<![\w/.-])(?:\.\./)*((?:[\w.-]+/)+[\w-]+\.py)\b")
BENCHMARKS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").glob("*/README.md"))
BASES = ("", "src", "src/gradsync", "tests", "benchmarks", "docs")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *PAGES, *BENCHMARKS])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = PATH.findall(read(page))
    missing = [path for path in named if not any((ROOT / base / path).is_file() for base in BASES)]
    assert missing == []


def test_the_map_has_every_room() -> None:
    package = ROOT / "src" / "gradsync"
    rooms = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    single = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
    text = read("CONTRIBUTING.md")
    assert [room for room in (*rooms, *single) if f"`{room}`" not in text] == []


def test_the_glossary_names_a_word_once() -> None:
    _, _, glossary = read("CONTRIBUTING.md").partition("## Glossary")
    nouns = re.findall(r"^\| ([\w-]+) \| .+ \| `.+` \|$", glossary, re.MULTILINE)
    assert 25 <= len(nouns) <= 28, "a noun that a PyTorch engineer knows anyway needs no line"
    assert len(nouns) == len(set(nouns))
