"""Do the tests notice? Change one thing at random in a room, run that room's tests, and count who is caught.

    python benchmarks/mutants/main.py --count 200 --seed 1 --rooms agreement,engine,compress,exchange,pace
    python benchmarks/mutants/main.py --seed 1 --only 17          # one again, to see which test ought to fail

Each mutant is a copy of the package in a folder of its own, put before the real one on the path. The files of the room
whose names share a word with the mutated module run first, so that most mutants die within seconds. A mutant that
outlives its room's tests is printed with its line: read it, then write the test, or say why both programs are the same.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "gradsync"
ROOMS = ("agreement", "engine", "compress", "exchange", "pace")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Mod: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of one file."""

    path: Path
    line: int
    what: str
    text: str  # of the whole file, changed

    def __str__(self) -> str:
        return f"{self.path.relative_to(PACKAGE)}:{self.line}: {self.what}"


def sites(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node inside of a function that can be changed; annotations, messages and docstrings are no program."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            if not (isinstance(statement, ast.Raise) or _is_docstring(statement)):
                yield from (node for node in _program(statement) if _is_site(node))


def _program(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.FunctionDef):
                yield from _program(child)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_site(node: ast.AST) -> bool:
    match node:
        case ast.Compare(ops=[one]):
            return type(one) in _COMPARISONS
        case ast.BinOp(op=operator):
            return type(operator) in _ARITHMETIC
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.IfExp():
            return True
        case ast.Constant(value=value):
            return isinstance(value, bool) or (isinstance(value, int) and abs(value) < 100)
        case ast.Expr(value=ast.Call()):
            return True
        case ast.Return(value=value):
            return value is not None and not (isinstance(value, ast.Constant) and value.value is None)
    return False


def changed(node: ast.AST) -> tuple[ast.AST, str]:
    """What stands in the node's place, and in words what was done."""
    match node:
        case ast.Compare(ops=[one]):
            other = _COMPARISONS[type(one)]
            return ast.Compare(node.left, [other()], node.comparators), f"{type(one).__name__} -> {other.__name__}"
        case ast.BinOp(op=operator):
            made = _ARITHMETIC[type(operator)]
            return ast.BinOp(node.left, made(), node.right), f"{type(operator).__name__} -> {made.__name__}"
        case ast.BoolOp(op=ast.And()):
            return ast.BoolOp(ast.Or(), node.values), "and -> or"
        case ast.BoolOp():
            return ast.BoolOp(ast.And(), node.values), "or -> and"
        case ast.UnaryOp():
            return node.operand, "not taken away"
        case ast.IfExp():
            return ast.IfExp(node.test, node.orelse, node.body), "branches exchanged"
        case ast.Constant(value=bool() as value):
            return ast.Constant(not value), f"{value} -> {not value}"
        case ast.Constant(value=int() as value):
            return ast.Constant(value + 1), f"{value} -> {value + 1}"
        case ast.Expr():
            return ast.Pass(), f"not called: {ast.unparse(node)[:60]}"
        case ast.Return():
            return ast.Return(ast.Constant(None)), "returns None"
    raise AssertionError(node)


class _Replace(ast.NodeTransformer):
    def __init__(self, place: int, by: ast.AST) -> None:
        self._left, self._by = place, by

    def visit(self, node: ast.AST) -> ast.AST:
        self._left -= 1
        return self._by if self._left == -1 else super().generic_visit(node)


def draw(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """So many mutants, each line of the rooms with the same chance."""
    chance = random.Random(seed)
    files = [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py")) if "triton" not in path.name]
    texts = {path: path.read_text() for path in files}
    weights = [text.count("\n") for text in texts.values()]
    found: list[Mutant] = []
    seen = set()
    while len(found) < count:
        [path] = chance.choices(files, weights)
        tree = ast.parse(texts[path])
        places = [(node, number) for number, node in enumerate(_in_order(tree))]
        wanted = {id(node) for node in sites(tree)}
        places = [(node, number) for node, number in places if id(node) in wanted]
        if not places:
            continue
        node, number = chance.choice(places)
        if (path, number) in seen:
            continue
        seen.add((path, number))
        by, what = changed(node)
        text = ast.unparse(ast.fix_missing_locations(_Replace(number, by).visit(tree)))
        found.append(Mutant(path, getattr(node, "lineno", 0), what, text))
    return found


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Every node, in the order in which a NodeTransformer comes by."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def tests_of(mutant: Mutant) -> list[list[str]]:
    """The room's files that are about the module, then the others."""
    room = mutant.path.relative_to(PACKAGE).parts[0]
    words = {word.rstrip("s") for word in mutant.path.stem.split("_")}
    files = sorted((ROOT / "tests" / room).rglob("test_*.py"))
    files = [path for path in files if "gpu" not in path.name]
    near = [str(path) for path in files if words & {word.rstrip("s") for word in path.stem.split("_")}]
    return [near, [str(path) for path in files if str(path) not in near]]


def outcome(mutant: Mutant, timeout: float) -> tuple[str, float]:
    """`killed`, `timeout` (killed, too: the tests did not end) or `survived`, and how long it took."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / "gradsync", ignore=shutil.ignore_patterns("__pycache__", "native"))
        (Path(folder) / "gradsync" / mutant.path.relative_to(PACKAGE)).write_text(mutant.text)
        env = {**os.environ, "PYTHONPATH": folder, "GLOO_SOCKET_IFNAME": "lo"}
        for files in tests_of(mutant):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *files]
            if files:
                child = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                try:
                    code = child.wait(timeout)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    return "timeout", time.monotonic() - begun
                if code:
                    return "killed", time.monotonic() - begun
    return "survived", time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--only", type=int, help="the number of the one mutant to try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a room's tests")
    parser.add_argument("--json", type=Path, help="write what came of each here")
    options = parser.parse_args()
    mutants = draw(options.rooms.split(","), options.count, options.seed)
    chosen = range(len(mutants)) if options.only is None else [options.only]
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        tried = [(number, pool.submit(outcome, mutants[number], options.timeout)) for number in chosen]
        for number, future in tried:
            came, seconds = future.result()
            rows.append(
                {"number": number, "mutant": str(mutants[number]), "outcome": came, "seconds": round(seconds, 1)}
            )
            print(f"{number:4} {came:8} {seconds:6.1f} s  {mutants[number]}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    killed = sum(row["outcome"] != "survived" for row in rows)
    print(f"{killed} of {len(rows)} noticed ({killed / len(rows):.0%})")


if __name__ == "__main__":
    main()
