"""Which test comes by which statement, in whatever process: each statement of a copied room says so itself.

The number of the test that runs is in a page of memory which all processes share, so ranks need not be told.
"""

from __future__ import annotations

import ast
from pathlib import Path

# What the copy of the package gets as `_passed.py`: each place is written once for each test and process.
RECORDER = """
import mmap
import os

_test = memoryview(b"\\0" * 8).cast("Q")
_written: dict[str, int] = {}
_file = -1
if "MUTANTS_PASSED" in os.environ:
    _file = os.open(os.environ["MUTANTS_PASSED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    _page = os.open(os.environ["MUTANTS_TEST"], os.O_RDWR)
    _test = memoryview(mmap.mmap(_page, 8)).cast("Q")
    os.close(_page)


def passed(place: str) -> None:
    test = _test[0]
    if _written.get(place) != test:
        _written[place] = test
        if _file >= 0:
            os.write(_file, f"{test} {place}\\n".encode())
"""


def instrument(package: Path, room: str) -> None:
    """Rewrite a copy of the package: every statement of the room's functions tells that a test comes by."""
    (package / "_passed.py").write_text(RECORDER)
    for path in (package / room).rglob("*.py"):
        if "triton" not in path.name:
            tree = ast.parse(path.read_text())
            _tell(tree, path.relative_to(package).as_posix(), inside=False)
            body = tree.body
            first = next((i for i, one in enumerate(body) if not _comes_first(one)), len(body))
            body.insert(first, ast.parse("from gradsync._passed import passed as __passed__").body[0])
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def _comes_first(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _tell(node: ast.AST, file: str, inside: bool) -> None:
    for name, value in ast.iter_fields(node):
        if not isinstance(value, list):
            if isinstance(value, ast.AST):
                _tell(value, file, inside)
            continue
        within = inside or isinstance(node, ast.FunctionDef)
        for child in value:
            if isinstance(child, ast.AST):
                _tell(child, file, within and not isinstance(child, ast.ClassDef))
        if within and name in ("body", "orelse", "finalbody") and value and isinstance(value[0], ast.stmt):
            told = []
            for statement in value:
                if not (_comes_first(statement) or isinstance(statement, ast.Global | ast.Nonlocal)):
                    told += ast.parse(f"__passed__({f'{file}:{statement.lineno}'!r})").body
                told.append(statement)
            setattr(node, name, told)


def read(path: Path) -> dict[str, set[int]]:
    """The numbers of the tests that came by each place; 0 is what was passed at import, before any test."""
    places: dict[str, set[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        number, _, place = line.partition(" ")
        places.setdefault(place, set()).add(int(number))
    return places
