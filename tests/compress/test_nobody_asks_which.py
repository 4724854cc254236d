"""Nobody outside of `compress/` asks which compressor it has: what one does differently is a method of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gradsync

SOURCE = Path(gradsync.__file__).parent
# What a codec says that it wants from the exchange, and a table, are data: asking for their kind is their purpose.
DATA = {"rounds.py", "toml.py", "param.py"}


def compressors() -> set[str]:
    files = [path for path in (SOURCE / "compress").glob("*.py") if path.name not in DATA]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def asked_for(text: str) -> Iterator[str]:
    """The classes for which a file asks, by isinstance or by match: line and class."""
    for node in ast.walk(ast.parse(text)):
        kinds: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            kinds = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            kinds = [node.cls]
        names = {ast.unparse(each).split(".")[-1] for kind in kinds for each in ast.walk(kind) if _is_name(each)}
        yield from (f"{node.lineno} {name}" for name in sorted(names))


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def test_nobody_outside_asks_which_compressor_it_has() -> None:
    known, found = compressors(), []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith("compress/"):
            found += [f"{name}:{each}" for each in asked_for(path.read_text()) if each.split()[1] in known]
    assert not found, f"give it a method: {found}"


def test_who_asks_is_seen() -> None:
    text = "isinstance(a, Codec | wrappers.Warmup)\nmatch a:\n    case recipe.Choice():\n        pass\n"
    assert list(asked_for(text)) == ["1 Codec", "1 Warmup", "1 wrappers", "3 Choice", "3 recipe"]
    assert {"Codec", "Compressor", "Choice"} <= compressors()
