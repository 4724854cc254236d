"""What was to be reached, and whether it was."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any, NamedTuple

from nccl import arms
from nccl.forecasts import predicted_s
from nccl.parts import GPT, PLANNED

Cells = dict[str, dict[str, Any]]
_ENGINE = 1.02  # the goal of benchmarks/engine, where a part has none of its own


class Verdict(NamedTuple):
    """A number beside its target."""

    part: str
    cell: str
    what: str
    value: float
    target: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target


def ratio(cell: dict[str, Any], arm: str, base: str) -> float | None:
    """Median of the ratios within a round."""
    pairs = list(zip(*(cell["samples"].get(name, {}).get("wall_s", []) for name in (arm, base)), strict=False))
    return median(a / b for a, b in pairs) if pairs else None


def errors(cells: Cells) -> list[float]:
    """Of the planner's predictions, relative, by cell and plan."""
    found = []
    for cell in cells.values():
        for arm in PLANNED:
            said, measured = predicted_s(cell, arm), cell["medians"].get(arm, {}).get("wall_s")
            if said is not None and measured:
                found.append(said / measured - 1)
    return found


def verdicts(results: dict[str, Cells]) -> list[Verdict]:
    return [each for part, judge in _JUDGES.items() for each in judge(results.get(part, {}))]


def _loopback(cells: Cells) -> Iterator[Verdict]:
    wanted = {
        (arms.EXACT, arms.DDP): 1.00,
        (arms.BF16, arms.DDP_BF16): 0.85,
        (arms.INT8, arms.DDP): 0.45,
    }
    yield from _ratios("loopback", cells, wanted)


def _hosts(cells: Cells) -> Iterator[Verdict]:
    name = f"10gbit | {GPT}"
    if name not in cells:
        return
    faster = {arm: 1 / found for arm in arms.PLANS if (found := ratio(cells[name], arm, arms.DDP))}
    for arm, target in ((arms.INT8, 3.5), (arms.INT4, 6.0)):
        if arm in faster:
            yield Verdict("hosts", name, f"{arm}, times as fast as DDP", faster[arm], target, False)
    if faster:
        best = max(faster, key=lambda arm: faster[arm])
        yield Verdict("hosts", name, f"the best ({best}), times as fast as DDP", faster[best], 8.0, False)


def _planner(cells: Cells) -> Iterator[Verdict]:
    found = sorted(abs(error) for error in errors(cells))
    if len(found) > 1:
        yield Verdict("planner", "all", "cells", len(found), 24, False)
        yield Verdict("planner", "all", "error, median", median(found), 0.10)
        yield Verdict("planner", "all", "error, p90", quantiles(found, n=10)[-1], 0.20)


def _host(cells: Cells) -> Iterator[Verdict]:
    yield from _ratios("host", cells, {(arms.EXACT, arms.DDP): _ENGINE})


def _p2p(cells: Cells) -> Iterator[Verdict]:
    middle = {name: cell for name, cell in cells.items() if cell["size_mb"] == 25}
    yield from _ratios("p2p", middle, {("ring", "native"): 1.3})


def _compile(cells: Cells) -> Iterator[Verdict]:
    wanted = {
        (f"{arms.EXACT}, {how} compiled", f"{arms.DDP}, {against} compiled"): _ENGINE
        for how, against in (("whole", "whole"), ("blocks", "blocks"), ("blocks", "whole"))
    }
    yield from _ratios("compile", cells, wanted)


def _ratios(part: str, cells: Cells, wanted: dict[tuple[str, str], float]) -> Iterator[Verdict]:
    for name, cell in cells.items():
        if "samples" in cell:
            for (arm, base), target in wanted.items():
                if (found := ratio(cell, arm, base)) is not None:
                    yield Verdict(part, name, f"{arm} / {base}", found, target)


_JUDGES = {
    "loopback": _loopback,
    "hosts": _hosts,
    "planner": _planner,
    "host": _host,
    "p2p": _p2p,
    "compile": _compile,
}
