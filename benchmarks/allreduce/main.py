"""How fast is an all-reduce? On one host beside gloo and Open MPI, in a training step, and across hosts.

python benchmarks/allreduce/main.py                      # everything; on an idle machine, about 15 minutes
python benchmarks/allreduce/main.py --parts one_host     # or exposed, across
python benchmarks/allreduce/main.py --name "16 cores" --ranks 4 8 16 --parts one_host
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import exposed  # noqa: E402

import bench_harness  # noqa: E402

PARTS = ("one_host", "exposed", "across")
SIZES = "1K,16K,256K,1M,4M,25M,100M"
_COMMAND = "import sys; from gradsync.cli.main import main; sys.exit(main())"


def one_host(ranks: int, launches: int, mpi: bool) -> dict[str, Any]:
    """`gradsync bench` in fresh processes, several times: where memory lies differs from launch to launch."""
    runs = []
    for _ in range(launches):
        options = ["bench", "--ranks", str(ranks), "--sizes", SIZES, "--cache", "both", "--json"]
        command = [sys.executable, "-c", _COMMAND, *options, *([] if mpi else ["--no-mpi"])]
        run = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        say(f"{ranks} ranks, one host: others used {run['machine']['busy_cores_of_others']:.2f} cores")
        runs.append(run)
    cells = [_joined(same) for same in zip(*(run["cells"] for run in runs), strict=True)]
    return {
        "machine": runs[-1]["machine"],
        "memory_bandwidth": [run["memory_bandwidth"] for run in runs],
        "busy_cores_of_others": [run["machine"]["busy_cores_of_others"] for run in runs],
        "cells": cells,
    }


def _joined(cells: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The launches of one cell: medians of their medians."""
    first = cells[0]
    bounds = [cell["bound_fraction"] for cell in cells if cell["bound_fraction"] is not None]
    return {key: first[key] for key in ("arm", "dtype", "nbytes", "cache", "busy")} | {
        "time_s": median(cell["time_s"] for cell in cells),
        "times_s": [cell["time_s"] for cell in cells],
        "wrong": sum(cell["wrong"] for cell in cells),
        "bound_fraction": median(bounds) if bounds else None,
        "samples": [round(x, 7) for cell in cells for x in cell["samples"]],
    }


def host_tables(results: dict[str, Any]) -> str:
    """For the README: times, and how many times faster than the peers."""
    texts = []
    for ranks, run in results.items():
        for cache in ("warm", "cold"):
            by_size: dict[int, dict[str, dict[str, Any]]] = {}
            for cell in run["cells"]:
                if cell["cache"] == cache and not cell["busy"]:
                    by_size.setdefault(cell["nbytes"], {})[cell["arm"]] = cell
            rows = [_row(nbytes, arms) for nbytes, arms in by_size.items()]
            header = ["size", "gloo", "Open MPI", "shared", "any tensor", "shared / gloo", "shared / MPI", "any / gloo"]
            header.append("of the bound")
            texts.append(f"{ranks} ranks, {cache} caches\n\n" + bench_harness.table(header, rows))
    return "\n\n".join(texts)


def _row(nbytes: int, arms: dict[str, dict[str, Any]]) -> list[str]:
    def time(arm: str) -> str:
        return _duration(arms[arm]["time_s"]) if arm in arms else "–"

    def times(arm: str, peer: str) -> str:
        return f"{arms[peer]['time_s'] / arms[arm]['time_s']:.1f}×" if peer in arms else "–"

    fraction = arms["shared"]["bound_fraction"]
    bound = f"{fraction:.0%}" if fraction is not None and nbytes >= 1 << 20 else "–"
    ratios = [times("shared", "gloo"), times("shared", "mpi"), times("any", "gloo")]
    return [_size(nbytes), time("gloo"), time("mpi"), time("shared"), time("any"), *ratios, bound]


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--launches", type=int, default=3, help="fresh processes per cell")
    parser.add_argument("--rounds", type=int, default=12, help="per launch, of training steps and across hosts")
    parser.add_argument("--no-mpi", action="store_true")
    parser.add_argument("--name", default="", help="of the machine, to keep its figures beside others")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--commit", default=bench_harness.commit(HERE), help="what is measured, outside of a clone")
    given = parser.parse_args()

    def keep(part: str, results: dict[str, Any]) -> None:
        facts = {"machine": bench_harness.machine(), "commit": given.commit, "results": results}
        bench_harness.save(given.out, {f"{part} {given.name}".strip(): facts})

    if "one_host" in given.parts:
        hosts = {str(n): one_host(n, given.launches, not given.no_mpi) for n in given.ranks}
        keep("one_host", hosts)
        say("\n" + host_tables(hosts) + "\n")
    if "exposed" in given.parts:
        steps = {str(n): exposed.measure(n, given.rounds, given.launches, say) for n in given.ranks}
        keep("exposed", steps)
        say("\n" + exposed.tables(steps) + "\n")
    if "across" in given.parts:
        import across  # late: only this part needs namespaces

        hops = across.measure(given.rounds, given.launches)
        keep("across", hops)
        say("\n" + across.tables(hops) + "\n")


if __name__ == "__main__":
    main()
