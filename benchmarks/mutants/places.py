"""Names of statements that stay when other lines of their file move: a function, its text, and the line within it."""

from __future__ import annotations

import ast
from hashlib import sha256
from typing import NamedTuple


class Place(NamedTuple):
    """A statement: the function it stands in, a digest of that function's text, and the line counted from its `def`."""

    function: str  # with the classes and functions around it
    digest: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} {self.digest} {self.line}"


def places(text: str) -> dict[int, Place]:
    """The place of every line of a file that lies in a function, the innermost one."""
    found: dict[int, Place] = {}
    lines = text.splitlines()

    def walk(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = around
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{around}.{child.name}" if around else child.name
            if isinstance(child, ast.FunctionDef):
                assert child.end_lineno is not None
                digest = sha256("\n".join(lines[child.lineno - 1 : child.end_lineno]).encode()).hexdigest()[:8]
                first = min((one.lineno for one in child.body), default=child.lineno)
                for line in range(first, child.end_lineno + 1):
                    found[line] = Place(inside, digest, line - child.lineno)
            walk(child, inside)

    walk(ast.parse(text), "")
    return found
