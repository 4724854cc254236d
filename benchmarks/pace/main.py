"""Which pace pays? Loss against samples, against the clock and against bytes; and who waits for a slow rank.

python benchmarks/pace/main.py learn                           # continues where it was interrupted
python benchmarks/pace/main.py steps --rate 100mbit 1gbit      # needs root
python benchmarks/pace/main.py stragglers
python benchmarks/pace/main.py table                           # README and picture, from results.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts first: its files are of the package `pace`.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import bench_harness  # noqa: E402
from gradsync.launch.spawn import RankFailed, RankPool  # noqa: E402
from netlab.lab import LabError  # noqa: E402
from pace import panels, report, stragglers  # noqa: E402
from pace.variants import NUM_RANKS, VARIANTS  # noqa: E402
from slow_link import store  # noqa: E402

RATES = ("100mbit", "1gbit")
Cells = dict[str, Callable[[], dict[str, Any]]]


def learn(options: argparse.Namespace) -> None:
    """Part 1: cell by cell, seeds first, so that every arm has one before any has two."""
    from pace.learn import learn as one  # late: a rank that imports this file needs none of it

    arms = [name for name in VARIANTS if (name in options.arms if options.arms else VARIANTS[name].learns)]
    with RankPool(NUM_RANKS, threads=1) as pool:
        cells: Cells = {
            f"{options.steps} steps | {arm} | seed {seed}": partial(one, pool, arm, seed, options.steps)
            for seed in options.seeds
            for arm in arms
        }
        _fill(options, "learn", cells)


def steps(options: argparse.Namespace) -> None:
    """Part 2: a rate after the other, all arms in turn."""
    from pace.steps import measure

    arms = [name for name in VARIANTS if VARIANTS[name].like is None and (not options.arms or name in options.arms)]
    _fill(options, "steps", {rate: partial(measure, rate, arms, options.rounds) for rate in options.rate})


def straggle(options: argparse.Namespace) -> None:
    """Part 3: cell by cell."""
    arms = [name for name in stragglers.VARIANTS if not options.arms or name in options.arms]
    with RankPool(stragglers.NUM_RANKS, threads=1) as pool:
        cells: Cells = {
            f"{scene} | {arm} | seed {seed}": partial(stragglers.run, pool, scene, arm, seed, options.steps)
            for seed in options.seeds
            for scene in stragglers.SCENES
            for arm in arms
        }
        _fill(options, "stragglers", cells)


def table(options: argparse.Namespace) -> None:
    """Part 4: everything that is derived from results.json."""
    results = store.load(options.out)
    report.write(options.readme, results)
    options.readme.with_name("paces.svg").write_text(panels.picture(results))


def _fill(options: argparse.Namespace, part: str, cells: Cells) -> None:
    """Those that are not there yet; one that fails is told, and is missing."""
    done = {} if options.again else store.load(options.out).get(part, {})
    failed = []
    for i, (name, measure) in enumerate(cells.items(), start=1):
        if name in done:
            print(f"{i} of {len(cells)}: {name}: there already", flush=True)
            continue
        print(f"{i} of {len(cells)}: {name} ... ", end="", flush=True)
        start = time.perf_counter()
        try:
            found = measure()
        except (RankFailed, LabError) as error:
            failed.append(name)
            print(f"FAILED: {str(error).strip().splitlines()[-1]}", flush=True)
            print(error, file=sys.stderr, flush=True)
            continue
        took_s = round(time.perf_counter() - start, 1)
        facts = {"machine": bench_harness.machine(), "commit": options.commit or bench_harness.commit(HERE)}
        store.keep(options.out, part, name, facts | {"cell_s": took_s} | found)
        loss = f"loss {found['final_held_out']:.4f}, " if "final_held_out" in found else ""
        print(f"{loss}{took_s:.0f} s", flush=True)
    if failed:
        sys.exit(f"{len(failed)} of {len(cells)} failed: {'; '.join(failed)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, default=HERE / "results.json")
    common.add_argument("--commit", help="what is measured, outside of a clone")
    common.add_argument("--again", action="store_true", help="also cells that results.json has")
    seeds = argparse.ArgumentParser(add_help=False)
    seeds.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    learned = parts.add_parser("learn", parents=[common, seeds], help="what is learned, step by step")
    learned.add_argument("--steps", type=int, default=500)
    learned.set_defaults(run=learn)
    timed = parts.add_parser("steps", parents=[common], help="seconds and bytes of a step")
    timed.add_argument("--rate", nargs="+", default=RATES, help="100mbit, 1gbit, none")
    timed.add_argument("--rounds", type=int, default=7, help="samples of each arm")
    timed.set_defaults(run=steps)
    waited = parts.add_parser("stragglers", parents=[common, seeds], help="who waits for a slow rank")
    waited.add_argument("--steps", type=int, default=80)
    waited.set_defaults(run=straggle)
    for part, names in ((learned, VARIANTS), (timed, VARIANTS), (waited, stragglers.VARIANTS)):
        part.add_argument("--arms", nargs="+", choices=tuple(names), metavar="ARM", help="; ".join(names))
    shown = parts.add_parser("table", parents=[common], help="tables of the README, and the picture")
    shown.add_argument("--readme", type=Path, default=HERE / "README.md")
    shown.set_defaults(run=table)
    return parser


if __name__ == "__main__":
    given = _parser().parse_args()
    given.run(given)
