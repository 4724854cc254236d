"""Do the tests notice? Change one thing at random in a room, run the room's tests that come by, count who is caught.

    python benchmarks/mutants/main.py --sample 200 --seed 1 --out benchmarks/mutants/results.json
    python benchmarks/mutants/main.py --room agreement --sample 40 --jobs 12   # one room, more at a time
    python benchmarks/mutants/main.py --only 17                                # one again, with what pytest prints
    python benchmarks/mutants/main.py --list                                   # what is drawn; nothing runs
    python benchmarks/mutants/main.py --table                                  # the README's table, of --out

First every test file of the rooms runs once on a copy whose statements tell which test comes by. What fails there is
tried again on a plain copy and left out if it fails again. Then each mutant, in a copy of the tree of its worker, meets
the tests that come by its line, the shortest first, until one fails. A file of results that is there already goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PACKAGE = Path("src/gradsync")
ROOMS = ["agreement", "engine", "compress", "exchange", "pace"]
TREE = ["src", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md"]

sys.path.insert(0, str(HERE.parent))

import passing  # noqa: E402
from mutations import Mutant, draw  # noqa: E402

from bench_harness import commit, machine, save, table  # noqa: E402


class Ran(NamedTuple):
    """What one pytest did: the numbers, seconds and last outcome of its tests; `code` is None past the time limit."""

    code: int | None
    number: dict[str, int]
    seconds: dict[str, float]
    outcome: dict[str, str]

    @property
    def failed(self) -> list[str]:
        return [test for test, outcome in self.outcome.items() if outcome == "failed"]


@dataclass
class Baseline:
    """The rooms' tests where nothing is changed."""

    seconds: dict[str, float] = field(default_factory=dict)
    places: dict[str, set[str]] = field(default_factory=dict)
    unmapped: list[str] = field(default_factory=list)  # fail where statements tell, pass where they do not
    left_out: list[str] = field(default_factory=list)  # fail on this machine without any mutant

    def meets(self, mutant: Mutant, own: bool = True) -> list[str]:
        """The tests that come by, the shortest first; then the others of their files, for what is done only once."""
        tests = [test for test in self.seconds if (room_of(test) == mutant.room) is own]
        near = self.places.get(mutant.place, set()).intersection(tests)
        files = {_file(test) for test in near}
        beside = [test for test in tests if _file(test) in files and test not in near]
        return sorted(near, key=self.seconds.__getitem__) + beside + [test for test in self.unmapped if test in tests]

    def facts(self, room: str) -> dict[str, Any]:
        of_room = [seconds for test, seconds in self.seconds.items() if room_of(test) == room]
        lists = {"unmapped": self.unmapped, "left_out": self.left_out}
        named = {key: [test for test in tests if room_of(test) == room] for key, tests in lists.items()}
        return {"tests": len(of_room), "seconds": round(sum(of_room), 1), **named}


def room_of(test: str) -> str:
    """Of tests/pace/test_x.py::test_y, or of the doctests in src/gradsync/pace."""
    return test.removeprefix("tests/").removeprefix(f"{PACKAGE}/").split("/")[0]


def copy_tree(to: Path) -> Path:
    kept_out = shutil.ignore_patterns("__pycache__", ".hypothesis", "native", "results.json", "*.svg")
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=kept_out)
        else:
            shutil.copy(ROOT / name, to / name)
    return to


def run_tests(
    tree: Path, files: list[str], limit: float, wanted: list[str] | None = None, told: Path | None = None,
    quiet: bool = True,
) -> Ran:  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        report, page, order = (Path(folder) / name for name in ("report", "page", "wanted"))
        env = {**os.environ, "MUTANTS_REPORT": str(report), "TMPDIR": folder, "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        paths = [str(tree / "src"), str(tree / "benchmarks" / "mutants"), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        if told is not None:
            page.write_bytes(bytes(8))
            env |= {"MUTANTS_TEST": str(page), "MUTANTS_PASSED": str(told)}
        options = ["-q", "-p", "mutants_plugin", "-p", "no:cacheprovider", "--timeout=60", "--hypothesis-seed=1"]
        if wanted is not None:
            order.write_text(json.dumps(wanted))
            env["MUTANTS_WANTED"] = str(order)
            options.append("-x")
        command = [sys.executable, "-m", "pytest", *options, *files]
        sink = subprocess.DEVNULL if quiet else None
        child = subprocess.Popen(command, cwd=tree, env=env, stdout=sink, stderr=sink, start_new_session=True)
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(limit)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its ranks, too
        child.wait()
        return _read(code, report)


def _read(code: int | None, report: Path) -> Ran:
    ran = Ran(code, {}, {}, {})
    for text in report.read_text().splitlines() if report.exists() else []:
        line = json.loads(text)
        if "start" in line:
            ran.number[line["start"]] = line["number"] or 0
        else:
            test = line["test"]
            ran.seconds[test] = ran.seconds.get(test, 0.0) + line["seconds"]
            if ran.outcome.get(test) in (None, "passed"):
                ran.outcome[test] = line["outcome"]
    for test in ran.number:
        ran.outcome.setdefault(test, "failed")  # begun, and the process ended
    return ran


def baseline(rooms: list[str], folder: Path, pool: ThreadPoolExecutor, limit: float) -> Baseline:
    telling, files = copy_tree(folder / "telling"), [f"{PACKAGE}/{room}" for room in rooms]
    for room in rooms:
        passing.instrument(telling / PACKAGE, room)
        files += [str(path.relative_to(ROOT)) for path in (ROOT / "tests" / room).rglob("test_*.py")]
    files = sorted((file for file in files if "gpu" not in file), key=lambda file: -(ROOT / file).stat().st_size)

    def one(file: str) -> tuple[str, Ran, dict[str, set[int]]]:
        told = folder / f"told-{file.replace('/', '-')}"
        ran = run_tests(telling, [file], limit, told=told)
        return file, ran, passing.read(told)

    made = Baseline()
    again: dict[str, list[str]] = {}
    for file, ran, places in pool.map(one, files):
        good = {test: ran.seconds[test] for test, outcome in ran.outcome.items() if outcome == "passed"}
        made.seconds |= good
        if ran.failed:
            again[file] = ran.failed
        if ran.code not in (0, 1, 5):
            print(f"{file}: pytest ended with {ran.code} after {len(good)} tests", flush=True)
        named = {number: test for test, number in ran.number.items()}
        for place, numbers in places.items():
            comes_by = good.keys() if 0 in numbers else {named[number] for number in numbers}
            made.places.setdefault(place, set()).update(comes_by)
    plain = copy_tree(folder / "plain") if again else folder
    for ran in pool.map(lambda file: run_tests(plain, [file], limit, again[file]), again):
        passed = [test for test, outcome in ran.outcome.items() if outcome == "passed"]
        made.seconds |= {test: ran.seconds[test] for test in passed}
        made.unmapped += passed
    made.left_out = sorted(test for tests in again.values() for test in tests if test not in made.seconds)
    return made


def try_one(mutant: Mutant, tests: list[str], known: Baseline, tree: Path, end: float, quiet: bool) -> dict[str, Any]:
    """What these tests make of a mutant; nothing if the time was over before."""
    if not tests:
        return {"outcome": "unreached", "seconds": 0.0, "tests": 0}
    path = tree / PACKAGE / mutant.file
    original = path.read_text()
    limit, begun = 30 + 4 * sum(known.seconds[test] for test in tests), time.monotonic()
    try:
        _write(path, mutant.text)
        files = sorted({_file(test) for test in tests})
        ran = run_tests(tree, files, max(0.0, min(limit, end - begun)), tests, quiet=quiet)
    finally:
        _write(path, original)
    if ran.code is None and time.monotonic() >= end:
        return {}
    row: dict[str, Any] = {"outcome": {0: "survived", None: "timeout"}.get(ran.code, "killed")}
    row |= {"seconds": round(time.monotonic() - begun, 1), "tests": len(tests)}
    if row["outcome"] != "survived":
        row["by"] = ran.failed[0] if ran.failed else "pytest could not begin"
    return row


def _write(path: Path, text: str) -> None:
    """Bytecode is told apart by second and size: a mutant of the same length would run as the original."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _file(test: str) -> str:
    return test.partition("::")[0]


@contextmanager
def workers(jobs: int, folder: Path) -> Iterator[tuple[ThreadPoolExecutor, SimpleQueue[Path]]]:
    """As many threads, and a copy of the tree for each."""
    trees: SimpleQueue[Path] = SimpleQueue()
    with ThreadPoolExecutor(jobs) as pool:
        for tree in pool.map(lambda number: copy_tree(folder / f"tree{number}"), range(jobs)):
            trees.put(tree)
        yield pool, trees


def control(mutant: Mutant) -> Mutant:
    """Nothing changed, in the same file: a test that fails here would have killed any mutant."""
    text = (ROOT / PACKAGE / mutant.file).read_text()
    return mutant._replace(before="nothing", after="nothing", text=ast.unparse(ast.parse(text)))


def rates(rows: list[dict[str, Any]]) -> str:
    counted = []
    for room in [*sorted({row["room"] for row in rows}), "all"]:
        of_room = Counter(row["outcome"] for row in rows if room in (row["room"], "all"))
        noticed, total = of_room["killed"] + of_room["timeout"], sum(of_room.values())
        numbers = [total, of_room["killed"], of_room["timeout"], of_room["survived"], of_room["unreached"]]
        counted.append([room, *map(str, numbers), f"{noticed / total:.0%}"])
    header = ["room", "mutants", "a test failed", "tests did not end", "survived", "no test comes by", "noticed"]
    return table(header, counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", nargs="+", choices=ROOMS, default=ROOMS)
    parser.add_argument("--sample", type=int, default=200, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--controls", type=int, default=5, help="copies without a change that have to pass")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of the mutants to try, loud")
    parser.add_argument("--elsewhere", action="store_true", help="try survivors on the other rooms' tests, too")
    parser.add_argument("--minutes", type=float, default=600, help="begin nothing, and end what runs, after that long")
    parser.add_argument("--commit", default=commit(ROOT), help="for a tree without its history")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    mutants = draw(ROOT / PACKAGE, options.room, options.sample, options.seed)
    chosen = {number: mutants[number] for number in options.only or range(len(mutants))}
    question = {"rooms": options.room, "sample": options.sample, "seed": options.seed}
    stored = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.list:
        for number, one in chosen.items():
            print(f"{number:4} {one.file}:{one.line}: {one.before}  ->  {one.after}")
    elif options.table:
        print(rates(stored["mutants"]))
    else:
        went_on = {key: stored[key] for key in question if key in stored} == question and not options.only
        _try_all(chosen, stored if went_on else {}, question | {"commit": options.commit}, options)


def _try_all(chosen: dict[int, Mutant], stored: dict[str, Any], about: dict[str, Any], options: Any) -> None:
    begun = time.monotonic()
    end = begun + 60 * options.minutes
    rows: list[dict[str, Any]] = stored.get("mutants", [])
    done = {row["number"] for row in rows}
    todo = {number: one for number, one in chosen.items() if number not in done}
    with tempfile.TemporaryDirectory(prefix="mutants") as name, workers(options.jobs, Path(name)) as (pool, trees):
        folder = Path(name)
        drawn = sorted({one.room for one in todo.values()})
        known = baseline(ROOMS if options.elsewhere else drawn, folder, pool, 240)
        facts = {room: known.facts(room) for room in drawn}
        for room, found in facts.items():
            print(f"{room}: {json.dumps(found, indent=1)}", flush=True)
        print(f"{time.monotonic() - begun:.0f} s for the baseline", flush=True)
        about |= {"machine": machine(), "baseline": {**stored.get("baseline", {}), **facts}}

        def tried(one: Mutant) -> dict[str, Any]:
            tree, quiet = trees.get(), options.only is None
            try:
                row = try_one(one, known.meets(one), known, tree, end, quiet)
                if row.get("outcome") in ("survived", "unreached") and options.elsewhere:
                    row["elsewhere"] = try_one(one, known.meets(one, own=False), known, tree, end, quiet)
                return row
            finally:
                trees.put(tree)

        controls = [pool.submit(tried, control(one)) for one in list(todo.values())[: options.controls]]
        futures = {number: pool.submit(tried, one) for number, one in todo.items()}
        for number, future in futures.items():
            if row := future.result():
                one = chosen[number]
                change = {"file": one.file, "line": one.line, "before": one.before, "after": one.after}
                rows.append({"number": number, "room": one.room, **change, **row})
                said = f"{one.file}:{one.line}: {one.before[:60]!r} -> {one.after[:60]!r}"
                print(f"{number:4} {row['outcome']:9} {row['seconds']:6.1f} s  {said}", flush=True)
                if not options.only:
                    save(options.out, about | {"mutants": rows})
        bad = [row for future in controls if (row := future.result()).get("outcome") in ("killed", "timeout")]
        if not options.only:
            save(options.out, {"controls": {"tried": len(controls), "failed": bad}})
    print(
        f"{len(bad)} of {len(controls)} controls failed {bad or ''}; {len(chosen) - len(rows)} mutants were not tried"
    )
    print(f"{time.monotonic() - begun:.0f} s in all\n\n{rates(rows)}" if rows else "")


if __name__ == "__main__":
    main()
