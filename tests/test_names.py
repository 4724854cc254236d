"""A name stands for one thing: whoever has read a module's or a class's name once need not ask which one is meant."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
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
# They stood where the field has nouns.
METAPHORS = re.compile(
    "desk|courier|parcel|fleet|house|circle|ways|standing|keeping|vigil|post|letter|freight|twin|passage|greeting|page|"
    "gauge|meter|wires|holdings|vitals|inquest|grounds|chosen|choosing|announcing|pilot|plainly|apart|agenda"
)
# By the name: why this word is the field's own there.
MEANT = {
    "page": "an HTML page",
    "plan_page": "an HTML page",
    "post_mortem": "what is done after a crash",
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


def test_exceptions_are_named_where_the_rule_is() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    names = {*CONVENTIONS, *STEMS, *CLASSES}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_names_are_no_metaphors() -> None:
    """A desk, a courier and a fleet charm once, and say nothing of what they do."""
    found = {name: where for name, where in names_of_the_package() if any(map(METAPHORS.fullmatch, words(name)))}
    assert {name: where for name, where in found.items() if name not in MEANT} == {}, "name it by the field's noun"
    assert MEANT.keys() <= found.keys(), "no longer there, so take it off the list"


def names_of_the_package() -> Iterator[tuple[str, str]]:
    """Every module, folder and class, with its file."""
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE).as_posix()
        yield (path.parent.name if path.stem == "__init__" else path.stem), where
        yield from (
            (node.name, where) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
        )


def words(name: str) -> list[str]:
    """The words of a name, in snake or in camel case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def test_words_of_a_name_are_whole() -> None:
    assert [words(name) for name in ("_HTTPPost", "post_mortem", "Posture2", "RankPool")] == [
        ["http", "post"],
        ["post", "mortem"],
        ["posture"],
        ["rank", "pool"],
    ]


def test_files_can_be_read_in_one_sitting() -> None:
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: lines for name, lines in long.items() if lines >= 400} == {}
