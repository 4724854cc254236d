"""The tables of part 3. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

import bench_harness
from pace.stragglers import NUM_RANKS, SCENES, SYNCHRONOUS, VARIANTS
from slow_link.target import reached_at

Cell = dict[str, Any]
Cells = dict[str, list[Cell]]  # by arm

_SLACK = 1.02  # times what the synchronous arm ends in: what one would accept


def tables(cells: dict[str, Cell]) -> list[str]:
    """One per scene; a cell's name is `scene | arm | seed N`."""
    found: dict[str, Cells] = {}
    for name, cell in cells.items():
        scene, arm, _ = name.split(" | ")
        found.setdefault(scene, {}).setdefault(arm, []).append(cell)
    return [f"### {scene}\n\n{_table(found[scene])}" for scene in SCENES if scene in found]


def _table(arms: Cells) -> str:
    sync = arms.get(SYNCHRONOUS, [])
    target = _SLACK * mean(cell["final_held_out"] for cell in sync) if sync else None
    header = [
        "pace",
        "steps/s, all ranks",
        "against synchronous (per seed)",
        "from sleeps alone",
        "until the first rank is done",
        "final loss (per seed)",
        f"seconds to {target:.3f}" if target else "seconds to target",
        "staleness, mean (most)",
    ]
    return bench_harness.table(header, [[name, *_row(arms[name], sync, target)] for name in VARIANTS if name in arms])


def _row(cells: list[Cell], sync: list[Cell], target: float | None) -> list[str]:
    pairs = [(cell, other) for cell in cells for other in sync if cell["seed"] == other["seed"]]
    gains = [_rate(cell) / _rate(other) for cell, other in pairs]
    ideal = [other["sleeps_alone_s"] / cell["sleeps_alone_s"] for cell, other in pairs]
    early = [_early_rate(cell) / _rate(other) for cell, other in pairs]
    finals = [cell["final_held_out"] for cell in cells]
    return [
        f"{mean(map(_rate, cells)):.1f}",
        f"**{mean(gains):.2f} ×** ({', '.join(f'{gain:.2f}' for gain in gains)})" if gains else "–",
        f"{mean(ideal):.2f} ×" if ideal else "–",
        f"{mean(early):.2f} ×" if early else "–",
        f"{mean(finals):.3f} ({', '.join(f'{loss:.3f}' for loss in finals)})",
        _time_to(cells, target),
        " ".join(_staleness(cells)) or "–",
    ]


def _rate(cell: Cell) -> float:
    """Steps of all ranks per second."""
    return float(NUM_RANKS * cell["steps"] / cell["took_s"])


def _early_rate(cell: Cell) -> float:
    """The rate while all ranks still have steps to take."""
    return float(sum(cell["steps_by_then"]) / cell["first_done_s"])


def _time_to(cells: list[Cell], target: float | None) -> str:
    times = [reached_at(cell["held_out"], target) if target else None for cell in cells]
    reached = [time for time in times if time is not None]
    if len(reached) < len(times):
        return f"not reached in {len(times) - len(reached)} of {len(times)}"
    return f"{mean(reached):.1f} ({', '.join(f'{time:.1f}' for time in reached)})"


def _staleness(cells: list[Cell]) -> Iterator[str]:
    known = [cell["staleness"] for cell in cells if cell["staleness"].get("staleness_mean") is not None]
    if known:
        yield f"{mean(each['staleness_mean'] for each in known):.1f}"
        yield f"({max(each['staleness_max'] for each in known)})"
