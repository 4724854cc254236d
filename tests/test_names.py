"""A name stands for one thing: whoever has read a module's or a class's name once need not ask which one is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import gradsync

SOURCE = Path(gradsync.__file__).parent
# Every command has one of these, and its folder says whose.
CONVENTIONS = {"__init__", "command", "text", "as_json"}
# By the name: why it stands twice.
STEMS = {
    "plan": "the folder of the command and the package that it is the front of",
    "probe": "the folder of the command and the package that it is the front of",
    "report": "the folder of the command and the package that it is the front of",
}
CLASSES = {
    "GradSyncStrategy": "public: users of Fabric and of Lightning each import it from their framework's module",
}
# Written before this rule, and not renamed yet: may only get shorter.
YET: set[str] = set()


def test_modules_and_folders_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        places[path.stem].append(name)
        if path.stem == "__init__":
            places[path.parent.name].append(name)
    found = {name: where for name, where in places.items() if len(where) > 1 and name not in CONVENTIONS}
    assert found.keys() == STEMS.keys(), {name: where for name, where in found.items() if name not in STEMS}


def test_classes_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(SOURCE).as_posix())
    found = {name: where for name, where in places.items() if len(where) > 1}
    known = CLASSES.keys() | YET
    assert found.keys() <= known, {name: where for name, where in found.items() if name not in known}
    assert known <= found.keys(), f"no longer twice, so take it off the list: {known - found.keys()}"


def test_files_can_be_read_in_one_sitting() -> None:
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: lines for name, lines in long.items() if lines >= 400} == {}
