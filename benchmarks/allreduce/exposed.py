"""What does synchronization add to a training step on one host? Step minus step without it: DDP's, and ours.

DDP runs at its best of bucket size, bucket view and static graph; all arms take turns in the same processes, with
one thread per rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "engine")]

import bench_harness  # noqa: E402
import gradsync as gs  # noqa: E402


def measure(ranks: int, rounds: int, launches: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Each model on so many ranks: seconds per step of every arm."""
    cells = {}
    for name in ("few large", "1000 small"):
        runs = [gs.spawn(_train, ranks, name, rounds, timeout=900)[0] for _ in range(launches)]
        samples = {arm: [x for run in runs for x in run["samples"][arm]] for arm in runs[0]["samples"]}
        cells[name] = {"ddp": runs[-1]["ddp"], "samples": bench_harness.rounded(samples), **_sum_up(samples)}
        say(f"{ranks} ranks, {name}: exposed {cells[name]['ratio']:.2f} of DDP's")
    return cells


def _train(name: str, rounds: int) -> dict[str, Any]:
    """On each rank: all arms in turn."""
    # The other benchmark's arms, by path: both files are called main.
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("engine_main", BENCHMARKS / "engine" / "main.py")
    assert spec is not None
    assert spec.loader is not None
    engine = module_from_spec(spec)
    spec.loader.exec_module(engine)
    torch.set_num_threads(1)
    setting = engine.SETTINGS["cpu"]["two ranks, gloo"]
    choice, _ = engine.best_ddp(setting, name, 3)
    attached: list[gs.GradSync] = []
    arms = {
        "plain": engine.Variant(setting, name, "eager", engine._plain),
        "ddp": engine.Variant(setting, name, "eager", engine._ddp(*choice)),
        "gradsync": engine.Variant(setting, name, "eager", engine._gradsync(attached)),
    }
    for arm in arms.values():
        for _ in range(3):
            arm.turn()
    samples = bench_harness.interleave({each: arm.turn for each, arm in arms.items()}, rounds)
    keys = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")
    return {"samples": samples, "ddp": dict(zip(keys, choice, strict=True))}


def _sum_up(samples: bench_harness.Samples) -> dict[str, Any]:
    """Exposed seconds within a round, and the ratio of their medians."""
    exposed = {arm: [a - b for a, b in zip(samples[arm], samples["plain"], strict=True)] for arm in ("ddp", "gradsync")}
    return {
        "exposed_s": {arm: round(median(values), 6) for arm, values in exposed.items()},
        "exposed_quartiles": {
            arm: [round(q, 6) for q in quantiles(values, n=4)[::2]] for arm, values in exposed.items()
        },
        "ratio": round(median(exposed["gradsync"]) / median(exposed["ddp"]), 4),
    }


def tables(results: dict[str, Any]) -> str:
    """For the README."""
    rows = []
    for ranks, cells in results.items():
        for name, cell in cells.items():
            times = [bench_harness.milliseconds(cell["samples"][arm]) for arm in ("plain", "ddp", "gradsync")]
            exposed = [f"{1e3 * cell['exposed_s'][arm]:.1f}" for arm in ("ddp", "gradsync")]
            rows.append([ranks, name, *times, *exposed, f"**{cell['ratio']:.2f}**"])
    header = [
        "ranks",
        "parameters",
        "no sync ms",
        "DDP ms",
        "gradsync ms",
        "DDP exposed",
        "ours exposed",
        "ours / DDP's",
    ]
    return bench_harness.table(header, rows)
