"""Does what a step costs grow with the number of ranks? Simulated ranks by the thousand, and real ones as far as they fit.

python benchmarks/scale/main.py              # everything, about 15 minutes on an idle machine
python benchmarks/scale/main.py header death # parts: header, disagreement, heartbeat, attach, plan, real
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
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parents[1] / "tests" / "transport")]

import real_ranks  # noqa: E402

import bench_harness  # noqa: E402

RANKS = (8, 64, 256, 1024, 4096, 16384)
SIMULATED = [(ranks, 8) for ranks in RANKS] + [(1024, 1), (4096, 1)]
IN_ALL = RANKS[-1]


def header() -> list[dict[str, Any]]:
    import header_at_scale

    return [_told(header_at_scale.measure(ranks, per_host, IN_ALL)) for ranks, per_host in SIMULATED]


def disagreement() -> list[dict[str, Any]]:
    import header_at_scale

    return [_told(header_at_scale.disagree(ranks, 8)) for ranks in RANKS]


def heartbeat() -> list[dict[str, Any]]:
    import heartbeat_at_scale

    return [_told(heartbeat_at_scale.measure(ranks, per_host)) for ranks, per_host in SIMULATED if ranks > per_host]


def attach() -> list[dict[str, Any]]:
    import attach_at_scale

    met = [_told(attach_at_scale.meet(ranks, 8)) for ranks in RANKS]
    agreed = [_told(attach_at_scale.agree(ranks, 8)) for ranks in RANKS]
    return [a | {"agreement": b} for a, b in zip(met, agreed, strict=True)]


def plan() -> list[dict[str, Any]]:
    """What `gradsync plan` says of so many GPUs."""
    found = []
    for gpus in (16, 1024, 16384):
        command = [
            sys.executable,
            "-m",
            "gradsync",
            "plan",
            "--gpus",
            str(gpus),
            "--network",
            "400g",
            "--params",
            "1e9",
        ]
        text = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "400"}).stdout
        [said] = [line.strip("• ") for line in text.splitlines() if "agree by a header" in line]
        found.append(_told({"gpus": gpus, "said": said}))
    return found


def real() -> list[dict[str, Any]]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [_told(real_ranks.measure(ranks)) for ranks in (8, 16, 32, 64)]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "header": header, "disagreement": disagreement, "heartbeat": heartbeat, "attach": attach, "plan": plan, "real": real,
}  # fmt: skip


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
        results[part] = {"machine": bench_harness.machine(), "commit": _commit(), "rows": PARTS[part]()}
        print(f"    {time.perf_counter() - begun:.0f} s", flush=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
    ).stdout.strip()


if __name__ == "__main__":
    main()
