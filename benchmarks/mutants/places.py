"""Names of statements that stay when lines move and docstrings change: a function, what it does, and a number."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

# What no two versions of Python write alike.
_LEFT_OUT = {"type_params", "type_comment", "kind"}


class Place(NamedTuple):
    """A statement: the function it stands in, a digest of what that one does, and the how-manieth of it this is."""

    function: str  # with the classes and functions around it
    digest: str
    number: int

    def __str__(self) -> str:
        return f"{self.function} {self.digest} {self.number}"


def places(text: str) -> dict[int, Place]:
    """The place of every statement that lies in a function, the innermost one, by the line where it begins."""
    found: dict[int, Place] = {}

    def walk(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = around
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{around}.{child.name}" if around else child.name
            if isinstance(child, ast.FunctionDef):
                digest = digest_of(child)
                begins = sorted({each.lineno for statement in child.body for each in _statements(statement)})
                found.update({line: Place(inside, digest, number) for number, line in enumerate(begins)})
            walk(child, inside)

    walk(ast.parse(text), "")
    return found


def digest_of(node: ast.AST) -> str:
    """Equal for what does the same in the same words: comments, docstrings and the layout do not count."""
    return sha256(repr(_said(node)).encode()).hexdigest()[:12]


def _statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    if not _is_docstring(statement):
        yield from (each for each in ast.walk(statement) if isinstance(each, ast.stmt) and not _is_docstring(each))


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _said(value: object) -> object:
    if isinstance(value, ast.AST):
        fields = [_said(child) for name, child in ast.iter_fields(value) if name not in _LEFT_OUT]
        return type(value).__name__, fields
    if isinstance(value, list):
        return [_said(each) for each in value if not _is_docstring(each)]
    return repr(value)
