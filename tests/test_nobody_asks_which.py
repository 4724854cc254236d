"""Nobody asks which recipe a plan holds: what one does differently is said by it, as a method or as data.

Compressors are known in `compress/`, paces in `plan/paces.py` and `pace/`, algorithms in `algorithms/`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import gradsync
from gradsync.pace.contract import Pace
from gradsync.plan.pace_recipe import PaceRecipe
from gradsync.plan.paces import KINDS
from gradsync.plan.sync_plan import ALGORITHMS

SOURCE = Path(gradsync.__file__).parent
# What a codec says that it wants from the exchange, and a table, are data: asking for their kind is their purpose.
DATA = {"rounds.py", "toml.py", "param.py"}
# Two algorithms have no schedule, so whoever prices or runs schedules asks for them.
UNSCHEDULED = {"Native", "SharedMemory"}
# By file and algorithm: why it asks.
ALGORITHM_EXCEPTIONS = {
    ("planner/collective.py", "Hierarchical"): "a closed form, for schedules of too many ranks to walk through",
    ("planner/collective.py", "HalvingDoubling"): "likewise",
    ("planner/collective.py", "Ring"): "likewise",
    ("planner/collective.py", "Tree"): "likewise",
    ("exchange/choose_route.py", "Hierarchical"): "inside of hosts it adds up in shared memory, where there is some",
}


def compressors() -> set[str]:
    files = [path for path in (SOURCE / "compress").glob("*.py") if path.name not in DATA]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def paces() -> set[str]:
    return {kind.__name__ for kind in KINDS.values()}


def algorithms() -> set[str]:
    return {kind.__name__ for kind in ALGORITHMS.values()}


def asked_for(text: str) -> Iterator[tuple[int, str]]:
    """The classes for which a file asks, by isinstance or by match: line and class."""
    for node in ast.walk(ast.parse(text)):
        kinds: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            kinds = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            kinds = [node.cls]
        names = {ast.unparse(each).split(".")[-1] for kind in kinds for each in ast.walk(kind) if _is_name(each)}
        yield from ((node.lineno, name) for name in sorted(names))


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def sources_outside_of(rooms: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every file of the package, with its text, but those of these folders and files."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(rooms):
            yield name, path.read_text()


@pytest.mark.parametrize(
    ("recipes", "rooms", "exceptions"),
    [
        (compressors, ("compress/",), set()),
        (paces, ("plan/paces.py", "pace/"), set()),
        (algorithms, ("algorithms/",), ALGORITHM_EXCEPTIONS.keys()),
    ],
    ids=["compressors", "paces", "algorithms"],
)
def test_nobody_outside_asks_which_one_it_has(
    recipes: Callable[[], set[str]], rooms: tuple[str, ...], exceptions: set[tuple[str, str]]
) -> None:
    known = recipes() - UNSCHEDULED
    found = [(name, *each) for name, text in sources_outside_of(rooms) for each in asked_for(text)]
    asked = {(name, recipe): line for name, line, recipe in found if recipe in known}
    assert asked.keys() <= exceptions, f"give it a method: {asked}"
    assert exceptions <= asked.keys(), f"nobody asks this any more: {exceptions - asked.keys()}"


def test_a_pace_is_named_in_its_room_only() -> None:
    """No table beside `KINDS` has a line for each pace, and nobody asks for one by its name in a file."""
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, text in sources_outside_of(("plan/paces.py", "pace/", "__init__.py"))
        for node in ast.walk(ast.parse(text))
        if (_is_name(node) and ast.unparse(node).split(".")[-1] in paces())
        or (isinstance(node, ast.Constant) and node.value in KINDS)
    ]
    assert not found


@pytest.mark.parametrize("name", KINDS)
def test_a_pace_of_the_package_begins_as_one_from_outside_does(name: str) -> None:
    """`open` makes what is at work; the recipe knows its name only, for it stands below everything that sends."""
    module, _, made_by = KINDS[name].at_work.partition(":")
    maker = getattr(import_module(f"gradsync.pace.{module}"), made_by)
    assert issubclass(maker if isinstance(maker, type) else get_type_hints(maker)["return"], Pace)
    assert KINDS[name].open is PaceRecipe.open


def test_who_asks_is_seen() -> None:
    text = "isinstance(a, Codec | wrappers.Warmup)\nmatch a:\n    case recipe.Choice():\n        pass\n"
    assert list(asked_for(text)) == [(1, "Codec"), (1, "Warmup"), (1, "wrappers"), (3, "Choice"), (3, "recipe")]
    assert {"Codec", "Compressor", "Choice"} <= compressors()
    assert {"LocalSGD", "Gossip"} <= paces()
    assert {"Ring", "Hierarchical"} <= algorithms()
