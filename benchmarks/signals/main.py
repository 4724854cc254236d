"""What do trace, header and digests cost, and do they name what is wrong?

python benchmarks/signals/main.py                       # all of it: about ten minutes on two idle cores
python benchmarks/signals/main.py --only cost           # or: --only inside, --only faults
python benchmarks/signals/main.py --only faults --faults input kill --seeds 0 1
python benchmarks/signals/main.py --only table          # README.md from results.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts first: its files are of the package `signals`.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import bench_harness  # noqa: E402
from gradsync.launch.spawn import RankFailed, RankPool  # noqa: E402
from netlab.lab import LabError  # noqa: E402
from signals import cost, faults, inside, report  # noqa: E402
from signals.models import WORKLOADS  # noqa: E402
from slow_link import store  # noqa: E402

PARTS = ("cost", "inside", "faults", "table")
ROUNDS = {"10 ms": 50, "50 ms": 20}


def measure_cost(options: argparse.Namespace) -> int:
    """How many cells failed."""
    failed = 0
    for workload in WORKLOADS:
        rounds = options.rounds or ROUNDS[workload]
        failed += not _fill(options, "cost", workload, partial(cost.cell, workload, rounds, options.launches))
    return failed


def look_inside(options: argparse.Namespace) -> int:
    """How many cells failed."""
    cells = {workload: partial(inside.cell, workload, options.launches) for workload in WORKLOADS}
    return sum(not _fill(options, "inside", workload, cell) for workload, cell in cells.items())


def inject_faults(options: argparse.Namespace) -> int:
    """Seed by seed, so that every fault has one run before any has two; how many failed."""
    failed = 0
    with RankPool(4, threads=1) as pool:
        for seed in options.seeds:
            for name in options.faults:
                if reason := faults.possible(name):
                    print(f"{name}: left out: {reason}", flush=True)
                    continue
                what = {"what": faults.FAULTS[name].what}
                run = partial(faults.run, pool, name, seed)
                failed += not _fill(options, "faults", f"{name} | seed {seed}", run, what)
    return failed


def _fill(
    options: argparse.Namespace,
    part: str,
    name: str,
    measure: Callable[[], dict[str, Any]],
    about: dict[str, Any] | None = None,
) -> bool:
    """Measure one cell and keep it; one that fails is told, and is missing."""
    print(f"{part}: {name} ... ", end="", flush=True)
    load, start = os.getloadavg()[0], time.perf_counter()
    try:
        found = measure()
    except (RankFailed, LabError, faults.NotRun) as error:
        print(f"FAILED: {error}", flush=True)
        return False
    facts = {"machine": bench_harness.machine(), "commit": options.commit, "load_before": round(load, 2)}
    took_s = round(time.perf_counter() - start, 1)
    store.keep(options.out, part, name, facts | {"cell_s": took_s} | (about or {}) | found)
    print(f"{_in_short(found)} ({took_s:.0f} s)", flush=True)
    return True


def _in_short(found: dict[str, Any]) -> str:
    if "inside_s" in found:
        return ", ".join(f"{kind} {1e6 * median(taken):.0f} µs" for kind, taken in found["inside_s"].items())
    if "costs" in found:
        return ", ".join(f"{pair}: {100 * each['share']:+.1f} %" for pair, each in found["costs"].items())
    return ", ".join(f"{by} {'right' if found[f'{by}_names_it'] else 'WRONG'}" for by in ("report", "watch", "doctor"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, help=f"per launch ({ROUNDS})")
    parser.add_argument("--launches", type=int, default=3, help="fresh processes per model (3)")
    parser.add_argument("--faults", nargs="+", choices=tuple(faults.FAULTS), default=tuple(faults.FAULTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("--commit", default=bench_harness.commit(HERE), help="what is measured, outside of a clone")
    options = parser.parse_args()
    failed = measure_cost(options) if "cost" in options.only else 0
    failed += look_inside(options) if "inside" in options.only else 0
    failed += inject_faults(options) if "faults" in options.only else 0
    if "table" in options.only:
        report.write(options.readme, store.load(options.out))
    if failed:
        sys.exit(f"{failed} cells failed; see above")


if __name__ == "__main__":
    main()
