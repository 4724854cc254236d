"""Does what a step costs grow with the number of ranks? Simulated ranks by the thousand, and as many real ones as fit.

python benchmarks/scale/main.py              # everything, about 15 minutes on an idle machine
python benchmarks/scale/main.py header attach# some of its parts
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests" / "support")]

import bench_harness  # noqa: E402
from gradsync.agreement.header import header_nbytes  # noqa: E402
from scale import attach_at_scale, header_at_scale, heartbeat_at_scale, real_ranks  # noqa: E402
from scale.simulated import LATENCY_S  # noqa: E402

RANKS = (8, 64, 256, 1024, 4096, 16384)
SIMULATED = [(ranks, 8) for ranks in RANKS] + [(1024, 1), (4096, 1)]
IN_ALL = RANKS[-1]


def header() -> list[dict[str, Any]]:
    return [_told(header_at_scale.measure(ranks, per_host, IN_ALL)) for ranks, per_host in SIMULATED]


def disagreement() -> list[dict[str, Any]]:
    return [_told(header_at_scale.disagree(ranks, 8)) for ranks in RANKS]


def heartbeat() -> list[dict[str, Any]]:
    return [_told(heartbeat_at_scale.measure(ranks, per_host)) for ranks, per_host in SIMULATED if ranks > per_host]


def attach() -> list[dict[str, Any]]:
    met = [_told(attach_at_scale.meet(ranks, 8)) for ranks in RANKS]
    agreed = [_told(attach_at_scale.agree(ranks, 8)) for ranks in RANKS]
    return [a | {"agreement": b} for a, b in zip(met, agreed, strict=True)]


def plan() -> list[dict[str, Any]]:
    """What `gradsync plan` says of so many GPUs."""
    found = []
    for gpus in (16, 1024, 16384):
        gradsync = [str(Path(sys.executable).with_name("gradsync")), "plan", "--network", "400g", "--params", "1e9"]
        env = os.environ | {"COLUMNS": "400"}
        text = subprocess.run([*gradsync, "--gpus", str(gpus)], capture_output=True, text=True, env=env).stdout
        [said] = [line.strip("• ") for line in text.splitlines() if "agree by a header" in line]
        found.append(_told({"gpus": gpus, "said": said}))
    return found


def real() -> list[dict[str, Any]]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [_told(real_ranks.measure(ranks)) for ranks in (8, 16, 32, 64)]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "header": header,
    "disagreement": disagreement,
    "heartbeat": heartbeat,
    "attach": attach,
    "plan": plan,
    "real": real,
}


def tables(results: dict[str, Any]) -> str:
    """What README shows of the results."""
    lines: list[str] = []

    def table(title: str, heads: list[str], rows: list[list[str]]) -> None:
        lines.extend(["", f"**{title}**", "", _row(heads), _row(["---"] * len(heads)), *map(_row, rows)])

    def of(part: str) -> list[dict[str, Any]]:
        return results[part]["rows"] if part in results else []

    table(
        "Header: per step and rank, simulated: Python, calls of functions, messages and bytes",
        ["ranks", "a host", "levels", "Python ms, median", "mean", "most", "calls, median", "mean", "most", "messages",
         "most", "bytes", "latencies"],
        [
            [
                f"{r['ranks']:,}", str(r["per_host"]), str(r["depth"]), f"{r['python_ms']['median']:.3f}",
                f"{r['python_ms']['mean']:.3f}", f"{r['python_ms']['most']:.3f}", f"{r['calls']['median']:.0f}",
                f"{r['calls']['mean']:.0f}", f"{r['calls']['most']}", f"{r['messages']['mean']:.2f}",
                f"{r['messages']['most']}", f"{r['nbytes']['mean']:,.0f}", f"{r['clock_ms'] / 1e3 / LATENCY_S:.0f}",
            ]
            for r in of("header")
        ],
    )  # fmt: skip
    table(
        "Heartbeats and deaths: of each host's first rank, simulated, `dead_after` 10 s",
        ["ranks", "a host", "messages/s", "most", "Python ms/s", "most", "store requests/s",
         "named by all after"],
        [
            [
                f"{r['ranks']:,}", str(r["per_host"]), f"{r['messages_per_s']['mean']:.1f}",
                f"{r['messages_per_s']['most']:.0f}", f"{r['python_ms_per_s']['mean']:.2f}",
                f"{r['python_ms_per_s']['most']:.2f}", str(r["store_requests_per_s"]),
                "; ".join(f"{what}: {seconds:.1f} s" for what, seconds in r["named_after_s"].items()),
            ]
            for r in of("heartbeat")
        ],
    )  # fmt: skip
    table(
        "Attach: through the store, simulated; and the comparison of 1000 parameters by the tree",
        ["ranks", "rounds to meet", "with channels", "requests of a rank", "most", "bytes", "messages to compare",
         "one absent: named by"],
        [
            [
                f"{r['ranks']:,}", *map(str, r["rounds"].values()), f"{r['requests']['mean']:.0f}",
                str(r["requests"]["most"]),
                f"{r['nbytes']['mean']:,.0f}", f"{r['agreement']['messages']:.2f}", f"{r['absent']['named_by']:,}",
            ]
            for r in of("attach")
        ],
    )  # fmt: skip
    table(
        "Names, where ranks disagree: what one rank reads of all headers, once, simulated",
        ["ranks", "bytes", "Python ms", "latencies"],
        [
            [
                f"{r['ranks']:,}", f"{r['ranks'] * header_nbytes(header_at_scale.PARAMETERS):,}",
                f"{1e3 * r['read_s']:.2f}", f"{r['clock_ms'] / 1e3 / LATENCY_S:.0f}",
            ]
            for r in of("disagreement")
        ],
    )  # fmt: skip
    real = of("real")
    arms = list(real[0]["arms"]) if real else []
    table(
        "Real ranks of this machine, 8 to a host: processor ms per step and rank, all threads (the training thread)",
        ["ranks", *arms, "attach, wall s"],
        [
            [
                str(r["ranks"]),
                *(f"{arm['processor_ms']:.2f} ({arm['thread_ms']:.3f})" for arm in r["arms"].values()),
                f"{r['attach']['wall_s']:.2f}",
            ]
            for r in real
        ],
    )
    table(
        "The training thread's part of a header, apart: processor ms, and how often it waits and is put aside, a step",
        ["ranks", "launch", "wait", "the same computation without others", "slices of a wait", "switches"],
        [
            [
                str(r["ranks"]),
                *(f"{r['apart'][part]:.3f}" for part in ("launch_ms", "wait_ms", "alone_ms")),
                *(f"{r['apart'][part]:.1f}" for part in ("slices", "switches")),
            ]
            for r in real
            if "apart" in r
        ],
    )
    return "\n".join([*lines, ""])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _told(found: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all of them if none is named")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for part in options.parts or PARTS:
        print(f"--- {part}", flush=True)
        begun = time.perf_counter()
        rows = PARTS[part]()
        results[part] = {"machine": bench_harness.machine(), "commit": bench_harness.commit(HERE), "rows": rows}
        print(f"    {time.perf_counter() - begun:.0f} s", flush=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    readme = HERE / "README.md"
    before, begin, rest = readme.read_text().partition("<!-- begin tables -->\n")
    _, end, after = rest.partition("<!-- end tables -->")
    if options.results == HERE / "results.json":
        readme.write_text(before + begin + tables(results) + end + after)


if __name__ == "__main__":
    main()
