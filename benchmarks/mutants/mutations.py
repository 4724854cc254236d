"""Mutants of a room, drawn at random: one small change of the program in one file.

Only what runs in a function is changed. Docstrings, annotations, default values, assertions, what is raised and the
text of messages, `__repr__` and the like are left as they are: no test should hold the program to them. So are four
arguments of calls that change nothing of what it does (`_NO_BEHAVIOUR`).
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Mod: ast.Mult,
}  # fmt: skip
_NO_PROGRAM = {"annotation", "returns", "decorator_list", "args", "type_params"}
_FOR_PEOPLE = {"__repr__", "__str__", "__rich__"}
# Of calls: zip(strict=True) and check_invariants assert, stacklevel is of a message, maxsize is how much a memo keeps.
_NO_BEHAVIOUR = {"stacklevel", "strict", "check_invariants", "maxsize"}


class Mutant(NamedTuple):
    """One change: where, what, and the whole file after it."""

    file: str  # within the package
    line: int
    statement: int  # the line where its statement begins
    before: str
    after: str
    text: str

    @property
    def room(self) -> str:
        return self.file.split("/")[0]


class Site(NamedTuple):
    """A node that can be changed, its number in the order of a NodeTransformer, and the line of its statement."""

    node: ast.AST
    number: int
    statement: int


def draw(package: Path, rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """So many mutants, every line of the rooms with the same chance. Kernels that need a GPU are left out."""
    chance = random.Random(seed)
    files = [path for room in rooms for path in sorted((package / room).rglob("*.py")) if "triton" not in path.name]
    texts = {path: path.read_text() for path in files}
    weights = [text.count("\n") for text in texts.values()]
    found: list[Mutant] = []
    seen: set[tuple[Path, int]] = set()
    while len(found) < count:
        [path] = chance.choices(files, weights)
        if not (places := sites(ast.parse(texts[path]))):
            continue
        site = chance.choice(places)
        if (path, site.number) not in seen:
            seen.add((path, site.number))
            found.append(mutant(package, path, texts[path], site))
    return found


def mutant(package: Path, path: Path, text: str, site: Site) -> Mutant:
    file = path.relative_to(package).as_posix()
    by = changed(site.node)
    changer = _Replace(site.number, by)
    after = ast.unparse(ast.fix_missing_locations(changer.visit(ast.parse(text))))
    line = getattr(site.node, "lineno", site.statement)
    return Mutant(file, line, site.statement, ast.unparse(site.node), ast.unparse(by), after)


def sites(tree: ast.Module) -> list[Site]:
    numbers = {id(node): number for number, node in enumerate(_in_order(tree))}
    return [Site(node, numbers[id(node)], line) for node, line in _program(tree, None) if _is_site(node)]


def _program(node: ast.AST, line: int | None) -> Iterator[tuple[ast.AST, int]]:
    """Every node of the functions' bodies with the line of the statement it belongs to."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _is_docstring(node):
        return
    if isinstance(node, ast.FunctionDef):
        if node.name not in _FOR_PEOPLE:
            for statement in node.body:
                yield from _program(statement, statement.lineno)
        return
    if isinstance(node, ast.stmt) and line is not None:
        line = node.lineno
    if line is not None:
        yield node, line
    for name, value in ast.iter_fields(node):
        if name in _NO_PROGRAM and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(child, ast.keyword) and child.arg in _NO_BEHAVIOUR):
                yield from _program(child, line)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Every node, in the order in which a NodeTransformer comes by."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _is_site(node: ast.AST) -> bool:
    match node:
        case ast.Compare(ops=[one]):
            return type(one) in _COMPARISONS
        case ast.BinOp(op=operator):
            return type(operator) in _ARITHMETIC
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.IfExp() | ast.Expr(value=ast.Call()):
            return True
        case ast.Constant(value=value):
            return isinstance(value, bool) or (isinstance(value, int) and abs(value) < 100)
        case ast.Return(value=value):
            return value is not None and not isinstance(value, ast.Constant)  # None is as false as False
    return False


def changed(node: ast.AST) -> ast.AST:
    """What stands in the node's place."""
    match node:
        case ast.Compare(ops=[one]):
            return ast.Compare(node.left, [_COMPARISONS[type(one)]()], node.comparators)
        case ast.BinOp(op=operator):
            return ast.BinOp(node.left, _ARITHMETIC[type(operator)](), node.right)
        case ast.BoolOp(op=operator):
            return ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), node.values)
        case ast.UnaryOp():
            return node.operand
        case ast.IfExp():
            return ast.IfExp(node.test, node.orelse, node.body)
        case ast.Constant(value=bool() as value):
            return ast.Constant(not value)
        case ast.Constant(value=int() as value):
            return ast.Constant(value + 1)
        case ast.Expr():
            return ast.Pass()
        case ast.Return():
            return ast.Return(ast.Constant(None))
    raise AssertionError(node)


class _Replace(ast.NodeTransformer):
    def __init__(self, place: int, by: ast.AST) -> None:
        self._left, self._by = place, by

    def visit(self, node: ast.AST) -> ast.AST:
        self._left -= 1
        return self._by if self._left == -1 else super().generic_visit(node)
