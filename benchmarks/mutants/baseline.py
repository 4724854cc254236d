"""The rooms' tests where nothing is changed: which come by a statement, what each takes, which fail on this machine.

A baseline is made once, test file by test file, and kept in a file. What it says of a test file is used again while
that file does the same. A statement is known by its function (see `places`), so lines may move; of a function that has
changed since, all tests count that came by any line of it. A baseline only says which tests to try, and in which order:
that a test passes without a mutant is seen anew on the machine where it fails with one (`main.Checked`), so the file
may come from another machine.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import passing
from mutations import Mutant
from places import Place, places
from places import digest_of as digest_of_code
from pytest_runs import PACKAGE, ROOT, Ran, copy_tree, file_of, room_of, run_tests

LIMIT_S = 600.0  # for a file of tests


@dataclass
class TestFile:
    """What is known of a test file, or of the doctests of a room."""

    digest: str
    seconds: dict[str, float]  # of the tests that pass
    comes_by: dict[str, list[int]]  # the numbers of these tests, by "file place"
    unmapped: list[str] = field(default_factory=list)  # fail where statements tell, pass where they do not
    left_out: list[str] = field(default_factory=list)  # fail without any mutant


def digest_of(file: str) -> str:
    """Of a test file without its docstrings, or of the sources of a room, whose docstrings are tests."""
    path = ROOT / file
    if path.is_dir():
        return sha256(b"\0".join(text.read_bytes() for text in sorted(path.rglob("*.py")))).hexdigest()[:12]
    return digest_of_code(ast.parse(path.read_text()))


def test_files(rooms: Iterable[str]) -> list[str]:
    """The rooms' doctests, and their tests that need no GPU; the longest files first."""
    files = [f"{PACKAGE}/{room}" for room in rooms]
    for room in rooms:
        files += [str(path.relative_to(ROOT)) for path in (ROOT / "tests" / room).rglob("test_*.py")]
    files = [file for file in files if "gpu" not in file]
    return sorted(files, key=lambda file: -(ROOT / file).stat().st_size)


class Baseline:
    """What is known of all test files."""

    def __init__(self, files: dict[str, TestFile]) -> None:
        self.files = files
        self._doubted: set[str] = set()  # fail here without a mutant, whatever the file says

    def doubt(self, test: str) -> None:
        """Leave a test out from now on: it was seen to fail with nothing changed."""
        self._doubted.add(test)

    @property
    def doubted(self) -> list[str]:
        return sorted(self._doubted)

    @cached_property
    def seconds(self) -> dict[str, float]:
        return {test: seconds for one in self.files.values() for test, seconds in one.seconds.items()}

    @cached_property
    def _unmapped(self) -> list[str]:
        return [test for one in self.files.values() for test in one.unmapped]

    @cached_property
    def _comes_by(self) -> dict[str, dict[str, set[str]]]:
        """By file of the package, and place."""
        found: dict[str, dict[str, set[str]]] = {}
        for one in self.files.values():
            tests = list(one.seconds)
            for key, numbers in one.comes_by.items():
                file, _, place = key.partition(" ")
                found.setdefault(file, {}).setdefault(place, set()).update(tests[number] for number in numbers)
        return found

    def _near(self, mutant: Mutant) -> set[str]:
        of_file = self._comes_by.get(mutant.file, {})
        place = _places_of(mutant.file)[mutant.statement]
        near = set(of_file.get(str(place), ()))
        if any(key.startswith(f"{place.function} {place.digest} ") for key in of_file):
            return near
        same = [tests for key, tests in of_file.items() if key.startswith(f"{place.function} ")]
        return set().union(*(same or of_file.values()))

    def meets(self, mutant: Mutant, own: bool = True) -> list[str]:
        """The tests that come by, the shortest first; then the others of their files, for what is done only once."""
        tests = [t for t in self.seconds if (room_of(t) == mutant.room) is own and t not in self._doubted]
        near = self._near(mutant).intersection(tests)
        files = {file_of(test) for test in near}
        beside = [test for test in tests if file_of(test) in files and test not in near]
        known = [*sorted(near, key=self.seconds.__getitem__), *beside]
        return known + [test for test in self._unmapped if test in tests and test not in known]

    def facts(self, room: str) -> dict[str, Any]:
        of_room = [one for file, one in self.files.items() if room_of(file) == room]
        numbers = {
            "tests": sum(len(one.seconds) for one in of_room),
            "seconds": round(sum(sum(one.seconds.values()) for one in of_room), 1),
        }
        lists = {"unmapped": [one.unmapped for one in of_room], "left_out": [one.left_out for one in of_room]}
        return numbers | {key: sorted(chain.from_iterable(tests)) for key, tests in lists.items()}


@cache
def _places_of(file: str) -> dict[int, Place]:
    return places((ROOT / PACKAGE / file).read_text())


def make(rooms: list[str], kept: Path | None, folder: Path, pool: ThreadPoolExecutor) -> Baseline:
    """The baseline of these rooms; what the file `kept` knows is not asked again, and the rest is written there."""
    known = {file: TestFile(**one) for file, one in ({} if kept is None else _read(kept)).items()}
    files = test_files(rooms)
    found = {file: known[file] for file in files if file in known and known[file].digest == digest_of(file)}
    missing = [file for file in files if file not in found]
    print(f"{len(found)} test files are known, {len(missing)} are asked", flush=True)
    for file, one in _ask(missing, rooms, folder, pool):
        found[file] = one
        slow = f"{sum(one.seconds.values()):6.1f} s {file}: {len(one.seconds)} tests"
        print(f"{slow}, unmapped {one.unmapped}, left out {one.left_out}", flush=True)
        if kept is not None:
            _add(kept, file, one)
    return Baseline(found)


def _read(kept: Path) -> dict[str, Any]:
    return json.loads(kept.read_text()) if kept.exists() else {}


def _add(kept: Path, file: str, one: TestFile) -> None:
    """What others have written meanwhile stays."""
    beside = kept.with_name(f"{kept.name}.new")
    beside.write_text(json.dumps(_read(kept) | {file: asdict(one)}, separators=(",", ":")))
    beside.replace(kept)


def _ask(files: list[str], rooms: list[str], folder: Path, pool: ThreadPoolExecutor) -> Iterator[tuple[str, TestFile]]:
    if not files:
        return
    telling, plain = copy_tree(folder / "telling"), copy_tree(folder / "plain")
    for room in rooms:
        passing.instrument(telling / PACKAGE, room)
    asked = {pool.submit(_ask_one, file, telling, plain, folder): file for file in files}
    for future in as_completed(asked):
        yield asked[future], future.result()


def _ask_one(file: str, telling: Path, plain: Path, folder: Path) -> TestFile:
    told = folder / f"told-{file.replace('/', '-')}"
    digest = digest_of(file)
    ran = run_tests(telling, [file], LIMIT_S, told=told)
    if ran.code not in (0, 1, 5):
        print(f"{file}: pytest ended with {ran.code} after {len(ran.passed)} tests", flush=True)
    seconds = {test: ran.seconds[test] for test in ran.passed}
    made = TestFile(digest, seconds, _told(ran, told, list(seconds)))
    told.unlink(missing_ok=True)
    for test in ran.failed:  # one by one: the first that fails again would end the others
        again = run_tests(plain, [file], LIMIT_S, [test])
        if again.outcome.get(test) == "passed":
            made.seconds[test] = again.seconds[test]
            made.unmapped.append(test)
        else:
            made.left_out.append(test)
    return made


def _told(ran: Ran, told: Path, tests: list[str]) -> dict[str, list[int]]:
    """The numbers of the tests by place. What is passed before any test counts for all."""
    place_in = {test: number for number, test in enumerate(tests)}
    named = {number: place_in.get(test) for test, number in ran.number.items()}
    found: dict[str, list[int]] = {}
    for line, numbers in passing.read(told).items():
        file, _, lineno = line.rpartition(":")
        if 0 in numbers:
            which: Iterable[int | None] = range(len(tests))
        else:
            which = (named.get(number) for number in numbers)
        by = sorted({number for number in which if number is not None})
        if by:
            found[f"{file} {_places_of(file)[int(lineno)]}"] = by
    return found
