"""Does compression pay? Step time over a slow link, what it does to the loss, and both together.

python benchmarks/slow_link/main.py steps --rate 100mbit 1gbit    # needs root
python benchmarks/slow_link/main.py loss                          # continues where it was interrupted
python benchmarks/slow_link/main.py loss --replicas 8 --device cuda --size large
python benchmarks/slow_link/main.py table                         # README and pictures, from results.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts first: its files are of the package `slow_link`.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import bench_harness  # noqa: E402
from gradsync.launch.spawn import RankPool  # noqa: E402
from slow_link import bars, curves, replicas, report, store  # noqa: E402
from slow_link.loss import Task, learn  # noqa: E402
from slow_link.model import OPTIMIZERS, SIZES  # noqa: E402
from slow_link.variants import VARIANTS  # noqa: E402

RATES = ("100mbit", "1gbit")


def steps(options: argparse.Namespace) -> None:
    """Part 1: a rate after the other, all arms in turn."""
    from slow_link.steps import measure  # late: only this part needs namespaces

    arms = _variants(options.arms, lambda name: VARIANTS[name].timed)
    for rate in options.rate:
        facts = _facts(options) | measure(rate, arms, options.rounds)
        store.keep(options.out, "steps", rate, facts)
        print(f"\n{rate}\n\n{report.steps_table(facts)}\n", flush=True)


def loss(options: argparse.Namespace) -> None:
    """Part 2: cell by cell, seeds first, so that every arm has one before any has two."""
    task = Task(options.size, options.steps, options.optimizer, options.replicas or 2, bool(options.replicas))
    arms = _variants(
        options.arms, lambda name: VARIANTS[name].learns and (not options.replicas or replicas.supports(name))
    )
    done = {} if options.again else store.load(options.out).get("loss", {})
    with RankPool(task.ranks, threads=1) as pool:
        for seed, arm in ((seed, arm) for seed in options.seeds for arm in arms):
            name = f"{task.label} | {arm} | seed {seed}"
            if name in done:
                continue
            start = time.perf_counter()
            if options.replicas:
                learned = replicas.learn(task, arm, seed, options.device)
            else:
                learned = learn(pool, task, arm, seed)
            took_s = time.perf_counter() - start
            store.keep(options.out, "loss", name, _facts(options) | {"took_s": round(took_s, 1)} | learned)
            print(f"{name}: {learned['final_held_out']:.4f} on held-out text, in {took_s:.0f} s", flush=True)


def table(options: argparse.Namespace) -> None:
    """Everything that is derived from results.json."""
    results = store.load(options.out)
    report.write(HERE / "README.md", results)
    (HERE / "steps.svg").write_text(bars.picture(results.get("steps", {})))
    (HERE / "loss.svg").write_text(curves.picture(results))


def _variants(asked: list[str] | None, fits: Callable[[str], bool]) -> list[str]:
    """Those asked for, or all that fit."""
    return [name for name in VARIANTS if (name in asked if asked else fits(name))]


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    return {"machine": bench_harness.machine(), "commit": options.commit or bench_harness.commit(HERE)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, default=HERE / "results.json")
    common.add_argument("--commit", help="what is measured, outside of a clone")
    names = "; ".join(VARIANTS).replace("%", "%%")
    common.add_argument("--arms", nargs="+", choices=tuple(VARIANTS), metavar="ARM", help=names)
    timed = parts.add_parser("steps", parents=[common], help="seconds and bytes of a step")
    timed.add_argument("--rate", nargs="+", default=RATES, help="100mbit, 1gbit, none")
    timed.add_argument("--rounds", type=int, default=20, help="samples of each arm")
    timed.set_defaults(run=steps)
    learned = parts.add_parser("loss", parents=[common], help="what is learned")
    learned.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    learned.add_argument("--steps", type=int, default=1000)
    learned.add_argument("--size", choices=tuple(SIZES), default="small")
    learned.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    learned.add_argument("--replicas", type=int, default=0, help="ranks to play in one process; 0: two real ones")
    learned.add_argument("--device", default="cpu", help="with --replicas: cpu or cuda")
    learned.add_argument("--again", action="store_true", help="also cells that results.json has")
    learned.set_defaults(run=loss)
    shown = parts.add_parser("table", parents=[common], help="tables of the README, and pictures")
    shown.set_defaults(run=table)
    return parser


if __name__ == "__main__":
    given = _parser().parse_args()
    given.run(given)
