"""Do the tests notice? Change one thing at random in a room, run the room's tests that come by, count who is caught.

    python benchmarks/mutants/main.py --sample 200 --seed 1 --out benchmarks/mutants/results.json
    python benchmarks/mutants/main.py --room agreement --sample 40 --jobs 12   # one room, more at a time
    python benchmarks/mutants/main.py --sample 0 --baseline build/baseline.json   # only the baseline, for later
    python benchmarks/mutants/main.py --only 17                                # one again, with what pytest prints
    python benchmarks/mutants/main.py --list                                   # what is drawn; nothing runs
    python benchmarks/mutants/main.py --table                                  # the README's table, of --out

First every test file of the rooms runs once on a copy whose statements tell which test comes by; with --baseline FILE
that is kept, and only test files that changed since run again. What fails there is tried again on a plain copy and left
out if it fails again. Then each mutant, in a copy of the tree of its worker, meets the tests that come by its line, the
shortest first, until one fails which passes with nothing changed. A file of results that is there already goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Any

HERE = Path(__file__).parent
ROOMS = ["agreement", "engine", "compress", "exchange", "pace"]

sys.path.insert(0, str(HERE.parent))

import baseline  # noqa: E402
from baseline import Baseline  # noqa: E402
from mutations import Mutant, draw  # noqa: E402
from pytest_runs import PACKAGE, ROOT, Ran, copy_tree, file_of, run_tests  # noqa: E402

from bench_harness import commit, machine, save, table  # noqa: E402


@dataclass
class Checked:
    """Whether a test passes here with nothing changed: asked when it fails with a mutant, once."""

    known: Baseline
    answers: dict[str, bool] = field(default_factory=dict)

    def passes(self, test: str, tree: Path, end: float) -> bool | None:
        """None: the time was over before. Workers may ask at once, and find the same."""
        if test not in self.answers:
            limit = 30 + 4 * self.known.seconds[test]
            ran = run_tests(tree, [file_of(test)], max(0.0, min(limit, end - time.monotonic())), [test])
            if ran.code is None and time.monotonic() >= end:
                return None
            self.answers[test] = ran.outcome.get(test) == "passed"
            if not self.answers[test]:
                self.known.doubt(test)
        return self.answers[test]


def try_one(mutant: Mutant, own: bool, checked: Checked, tree: Path, end: float, quiet: bool) -> dict[str, Any]:
    """What the tests make of a mutant: "cut" if the time ended while they ran, nothing if it was over before.

    A test that fails with it, and passes without, has noticed. One that fails without, too, is left out, and the
    others are asked again.
    """
    begun = time.monotonic()
    if begun >= end:
        return {}
    while tests := checked.known.meets(mutant, own):
        ran = _with(mutant, tests, checked.known, tree, end, quiet)
        if ran.code is None and time.monotonic() >= end:
            return {"outcome": "cut"}
        row = {"outcome": "survived", "seconds": round(time.monotonic() - begun, 1), "tests": len(tests)}
        if ran.code == 0:
            return row
        if ran.code == 5:  # the baseline's tests are not there
            break
        by = ran.failed[0] if ran.failed else tests[0]
        passes = checked.passes(by, tree, end)
        if passes is None:
            return {"outcome": "cut"}
        if passes:
            said = by if ran.failed else "pytest could not begin"
            return row | {"outcome": "timeout" if ran.code is None else "killed", "by": said}
    return {"outcome": "unreached", "seconds": round(time.monotonic() - begun, 1), "tests": 0}


def _with(mutant: Mutant, tests: list[str], known: Baseline, tree: Path, end: float, quiet: bool) -> Ran:
    path = tree / PACKAGE / mutant.file
    original = path.read_text()
    limit = 30 + 4 * sum(known.seconds[test] for test in tests)
    try:
        _write(path, mutant.text)
        files = sorted({file_of(test) for test in tests})
        return run_tests(tree, files, max(0.0, min(limit, end - time.monotonic())), tests, quiet=quiet)
    finally:
        _write(path, original)


def _write(path: Path, text: str) -> None:
    """Bytecode is told apart by second and size: a mutant of the same length would run as the original."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


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
    parser.add_argument("--baseline", type=Path, help="keep what the tests come by in this file, and read it there")
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
        known = baseline.make(ROOMS if options.elsewhere else options.room, options.baseline, folder, pool)
        checked = Checked(known)
        facts = {room: known.facts(room) for room in drawn}
        for room, found in facts.items():
            print(f"{room}: {json.dumps(found, indent=1)}", flush=True)
        print(f"{time.monotonic() - begun:.0f} s for the baseline", flush=True)
        about |= {"machine": machine(), "baseline": {**stored.get("baseline", {}), **facts}}

        def tried(one: Mutant) -> dict[str, Any]:
            tree, quiet = trees.get(), options.only is None
            try:
                row = try_one(one, True, checked, tree, end, quiet)
                if row.get("outcome") in ("survived", "unreached") and options.elsewhere:
                    row["elsewhere"] = try_one(one, False, checked, tree, end, quiet)
                return row
            finally:
                trees.put(tree)

        controls = [pool.submit(tried, control(one)) for one in list(todo.values())[: options.controls]]
        futures = {number: pool.submit(tried, one) for number, one in todo.items()}
        cut = []
        for number, future in futures.items():
            row = future.result()
            if row.get("outcome") == "cut":
                cut.append(number)
            elif row:
                one = chosen[number]
                change = {"file": one.file, "line": one.line, "before": one.before, "after": one.after}
                rows.append({"number": number, "room": one.room, **change, **row})
                said = f"{one.file}:{one.line}: {one.before[:60]!r} -> {one.after[:60]!r}"
                print(f"{number:4} {row['outcome']:9} {row['seconds']:6.1f} s  {said}", flush=True)
                if not options.only:
                    save(options.out, about | {"mutants": rows})
        bad = [row for future in controls if (row := future.result()).get("outcome") in ("killed", "timeout")]
        if not options.only:
            save(
                options.out, {"controls": {"tried": len(controls), "failed": bad}, "cut": cut, "doubted": known.doubted}
            )
    print(f"{len(bad)} of {len(controls)} controls failed {bad or ''}; left out here: {known.doubted}")
    print(f"{len(chosen) - len(rows) - len(cut)} mutants were not tried, {len(cut)} were cut by the end of the time")
    print(f"{time.monotonic() - begun:.0f} s in all\n\n{rates(rows) if rows else ''}")


if __name__ == "__main__":
    main()
