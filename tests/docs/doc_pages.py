"""The blocks of the pages, as a Markdown reader sees them: what the tests of this folder run, parse or look at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *DOCS.rglob("*.md")))


class Block(NamedTuple):
    """A piece of code or output on a page. `language` is "" where the fence names none, None if there is no fence."""

    page: str
    line: int
    language: str | None
    text: str

    @property
    def where(self) -> str:
        """For messages: `docs/index.md:12`."""
        return f"{self.page}:{self.line}"


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page in order; only those in `languages`, if any are named."""
    found = [
        Block(page, token.map[0] + 1, _language(token.info) if token.type == "fence" else None, token.content)
        for token in MarkdownIt().parse(read(page))
        if token.type in ("fence", "code_block") and token.map is not None
    ]
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    """Those of every page."""
    return [block for page in PAGES for block in blocks(page, *languages)]


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def as_python(block: Block) -> str:
    """What runs: a diff is what it leads to, and lines keep the numbers they have on the page."""
    text = block.text
    if block.language == "diff":
        kept = [line for line in text.splitlines() if not line.startswith("-")]
        text = "\n".join(re.sub(r"^[+ ] ?", "", line) for line in kept)
    return "\n" * block.line + text


def _language(info: str) -> str:
    return info.split()[0] if info.split() else ""
