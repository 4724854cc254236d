"""A docstring is a sentence with a subject: it does not lean on the one before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from doc_pages import ROOT

PACKAGE = ROOT / "src" / "gradsync"
HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEANING = re.compile(
    r"(The same|One of them|Also|And|But|Or|Likewise|The other|See"  # on another docstring,
    r"|About|After|Against|Among|Around|As|At|Before|Behind|Beside|Between|Beyond|By|For|From|If|In|Inside|Into|Like"
    r"|Of|On|Once|Over|Per|Since|Through|To|Under|Unless|Until|Up|Upon|When|Where|While|Whose|With|Within|Without"
    r"|What|Whatever|Whether|How|Who|Whom|Which|Why|That|Those|All that|So|No|Not|Only|Its|Their"
    r")\b"  # or on the name below which it stands
)


def docstrings(room: str) -> Iterator[tuple[str, str]]:
    """The place and the first line of each; those of modules beside the rooms for the room ""."""
    paths = (PACKAGE / room).rglob("*.py") if room else PACKAGE.glob("*.py")
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, HOLDERS) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'the module')}", text.splitlines()[0]


@pytest.mark.parametrize("room", ["", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))])
def test_no_docstring_leans_on_another(room: str) -> None:
    assert [f"{where}: {text}" for where, text in docstrings(room) if LEANING.match(text)] == []
