"""Are the planner's predictions right, and its choices good? Probe and 5 steps first, then what was predicted.

python benchmarks/planner/main.py measure --link 100mbit loopback --ranks 2 3    # the shaped links need root
python benchmarks/planner/main.py table                                          # README, from results.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts first: its files are of the package `planner`.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import bench_harness  # noqa: E402
import gradsync as gs  # noqa: E402
from gradsync.cli.local_ranks import rank_folder  # noqa: E402
from planner import report  # noqa: E402
from planner.arms import LINKS, RATES  # noqa: E402
from planner.cells import play  # noqa: E402
from planner.models import MODELS  # noqa: E402
from slow_link import store  # noqa: E402

_HOUR_S = 3600.0
_ROUNDS = {"50mbit": 3, "100mbit": 3, "250mbit": 4}


def measure(options: argparse.Namespace) -> None:
    """A link after the other; what a link has is kept when it is done."""
    for link in options.link:
        for ranks in options.ranks:
            cell = f"{link} x {ranks}"
            begun, load = time.perf_counter(), os.getloadavg()[0]
            by_rank = _play(link, ranks, options.rounds or _ROUNDS.get(link, 5))
            facts = {
                "machine": bench_harness.machine(),
                "commit": options.commit or bench_harness.commit(HERE),
                "load_before": round(load, 2),
                "took_s": round(time.perf_counter() - begun, 1),
            }
            store.keep(options.out, "links", cell, facts | _joined(by_rank))
            print(f"{cell}: {facts['took_s']:.0f} s", flush=True)


def _play(link: str, ranks: int, rounds: int) -> list[dict[str, Any]]:
    with rank_folder(len(MODELS) * rounds, f"{ranks} ranks, {link}") as folder:
        if link not in RATES:
            return gs.spawn(play, ranks, link, rounds, folder, timeout=_HOUR_S)
        from netlab.lab import Lab  # late: only this needs namespaces

        with Lab(hosts=ranks, rate=link) as lab:
            return lab.spawn(play, 1, link, rounds, folder, timeout=_HOUR_S)


def _joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """A step ends with its last rank; the cluster is the same on all; each rank has its own profile."""
    models = {}
    for name in MODELS:
        samples = [rank["models"][name]["samples_s"] for rank in by_rank]
        models[name] = {
            "profiles": [text for rank in by_rank for text in rank["models"][name]["profiles"]],
            "samples_s": {
                arm: [max(same) for same in zip(*(s[arm] for s in samples), strict=True)] for arm in samples[0]
            },
        }
    return {key: by_rank[0][key] for key in ("probe_s", "cluster", "warnings")} | {"models": models}


def table(options: argparse.Namespace) -> None:
    """Predict from what was probed and profiled, and compare."""
    report.write(HERE / "README.md", store.load(options.out))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--commit", help="what is measured, where it is not a clone")
    parts = parser.add_subparsers(required=True)
    measured = parts.add_parser("measure")
    measured.add_argument("--link", nargs="+", choices=LINKS, default=list(LINKS))
    measured.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    measured.add_argument("--rounds", type=int)
    measured.set_defaults(run=measure)
    parts.add_parser("table").set_defaults(run=table)
    return parser


if __name__ == "__main__":
    chosen = _parser().parse_args()
    chosen.run(chosen)
