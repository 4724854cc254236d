"""What does synchronization cost over NCCL? Several ranks on one GPU, each with a host id of its own.

python benchmarks/nccl/main.py loopback            # on a machine with a GPU; also: hosts planner host p2p compile
python benchmarks/nccl/main.py --dry loopback      # tiny models on the CPU over gloo: does it run through?
python benchmarks/nccl/main.py --merge found.json  # cells that were measured elsewhere
python benchmarks/nccl/main.py --readme            # the tables of the README, from results.json
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts first: its files are of the package `nccl`.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import bench_harness  # noqa: E402
from nccl import tables  # noqa: E402
from nccl.launch import on_hosts, on_loopback  # noqa: E402
from nccl.mps import running_mps  # noqa: E402
from nccl.parts import PARTS, Start  # noqa: E402
from nccl.targets import verdicts  # noqa: E402
from netlab.lab import available  # noqa: E402
from slow_link import store  # noqa: E402


def run(part: str, options: argparse.Namespace) -> int:
    """All launches of a part, as long as it has time; how many had a problem."""
    begun, problems = time.monotonic(), 0
    limit_s = options.limit or PARTS[part].limit_s
    with contextlib.ExitStack() as stack:
        mps: dict[str, str] | None = None
        for start in PARTS[part].starts(options):
            left_s = limit_s - (time.monotonic() - begun)
            if left_s < 20:
                print(f"{part}, {start.title}: no time left", flush=True)
                continue
            if start.rate is not None and (reason := available()):
                print(f"{part}, {start.title}: there can be no hosts here, {reason}", flush=True)
                problems += 1
                continue
            if mps is None:
                mps = stack.enter_context(running_mps(wanted=not (options.dry or options.no_mps)))
            most_s = start.limit_s * limit_s / PARTS[part].limit_s
            problems += _launch(part, start, min(most_s, left_s), mps or {}, options)
    print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    if found := verdicts({part: store.load(options.out).get(part, {})}):
        print(tables.targets(found), flush=True)
    return problems


def _launch(part: str, start: Start, limit_s: float, mps: dict[str, str], options: argparse.Namespace) -> int:
    cells: dict[str, dict[str, Any]] = {}

    def tell(message: dict[str, Any]) -> None:
        if "note" in message:
            print(f"  {message['note']}", flush=True)
            return
        name = message.pop("cell")
        cells[name] = message | {"commit": options.commit}
        store.keep(options.out, part, name, cells[name])

    print(f"{part}, {start.title}: at most {limit_s:.0f} s", flush=True)
    if start.rate is None:
        ended = on_loopback(start.job, start.ranks, limit_s, mps, tell)
    else:
        ended = on_hosts(start.job, start.ranks, start.rate, limit_s, mps, tell)
    for name, cell in cells.items():
        kept = cell | {"launch_s": round(ended.seconds, 1)}
        store.keep(options.out, part, name, kept | ({"problem": ended.problem} if ended.problem else {}))
    if cells:
        print(tables.section(part, cells), flush=True)
    if ended.problem:
        print(f"{part}, {start.title}: {ended.problem}", flush=True)
    print(f"{part}, {start.title}: {ended.seconds:.0f} s", flush=True)
    return int(bool(ended.problem))


def _merge(found: Path, into: Path) -> None:
    for part, cells in store.load(found).items():
        for name, cell in cells.items():
            store.keep(into, part, name, cell)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="what to measure")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU, over gloo")
    parser.add_argument("--ranks", type=int, nargs="+", help="loopback, planner: only these numbers; p2p: the most")
    parser.add_argument("--rate", nargs="+", help="hosts, planner: only these links")
    parser.add_argument("--rounds", type=int, help="samples of each arm")
    parser.add_argument("--limit", type=float, help="seconds for each part, in place of its own")
    parser.add_argument("--each-turn", action="store_true", help="attach and detach in every turn")
    parser.add_argument("--full", action="store_true", help="planner: a probe of ten seconds or more, not of a few")
    parser.add_argument("--profile", action="store_true", help="host: also which functions take the time")
    parser.add_argument("--no-mps", action="store_true", help="let ranks take turns on the GPU")
    parser.add_argument("--out", type=Path, help="results.json, or with --dry a temporary file")
    parser.add_argument("--commit", default=bench_harness.commit(HERE), help="what is measured, outside of a clone")
    parser.add_argument("--merge", type=Path, help="take the cells of this file too")
    parser.add_argument("--readme", action="store_true", help="write the tables into the README")
    options = parser.parse_args()
    if options.out is None:
        options.out = Path(tempfile.gettempdir(), "nccl-dry.json") if options.dry else HERE / "results.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`
    problems = sum(run(part, options) for part in options.part)
    if options.merge:
        _merge(options.merge, options.out)
    if options.readme:
        tables.write(HERE / "README.md", store.load(options.out))
    return min(problems, 1)


if __name__ == "__main__":
    sys.exit(main())
