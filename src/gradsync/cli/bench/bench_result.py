"""The result of a bench, in numbers; pure. `as_json` is what --json prints, and stays as it is.

algbw = nbytes / time                   what a user gets
busbw = algbw · 2(n−1)/n                what each rank's link carries in a ring; comparable across n
bound_fraction = bound / time           of what memory allows, see `memory`; None across hosts
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from gradsync.cli.bench.all_reduce_variants import GLOO, NCCL, VARIANTS
from gradsync.cli.bench.bench_config import Setting
from gradsync.cli.bench.memory_bandwidth import bound_s
from gradsync.cli.bench.other_processes import disturbing


@dataclass(frozen=True)
class Cell:
    """One arm on one size under one setting. Samples are seconds, in the order of the rounds."""

    arm: str
    nbytes: int
    cache: str
    busy: bool
    samples: tuple[float, ...]
    wrong: int

    @property
    def setting(self) -> Setting:
        return Setting(self.cache, self.busy)

    @property
    def time_s(self) -> float:
        return median(self.samples)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def algbw(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.time_s


@dataclass(frozen=True)
class BenchResult:
    """All cells, and what stands around them."""

    ranks: int
    dtype: str
    machine: dict[str, Any]
    memory_bandwidth: float | None
    cells: tuple[Cell, ...]

    @property
    def disturbed(self) -> bool:
        """True if others were at work enough that arms cannot be compared."""
        return disturbing(self.machine.get("busy_cores_of_others"))

    @property
    def wrong(self) -> int:
        return sum(cell.wrong for cell in self.cells)

    @property
    def peer(self) -> str:
        """The arm that all others are compared with: the process group's own all-reduce."""
        return NCCL if any(cell.arm == NCCL for cell in self.cells) else GLOO

    def busbw(self, cell: Cell) -> float:
        return cell.algbw * 2 * (self.ranks - 1) / self.ranks

    def bound_fraction(self, cell: Cell) -> float | None:
        bandwidth = self.memory_bandwidth
        return None if bandwidth is None else bound_s(cell.nbytes, self.ranks, bandwidth) / cell.time_s

    def counterpart(self, cell: Cell, arm: str) -> Cell:
        """The cell of another arm that was measured in turn with this one."""
        return next(c for c in self.cells if c.arm == arm and (c.nbytes, c.setting) == (cell.nbytes, cell.setting))

    def as_json(self) -> dict[str, Any]:
        return {
            "command": "bench",
            "ranks": self.ranks,
            "dtype": self.dtype,
            "machine": self.machine,
            "memory_bandwidth": self.memory_bandwidth,
            "cells": [self._cell_as_json(cell) for cell in self.cells],
        }

    def _cell_as_json(self, cell: Cell) -> dict[str, Any]:
        low_s, high_s = cell.quartiles_s
        return {
            "arm": cell.arm,
            "algorithm": VARIANTS[cell.arm].algorithm,
            "dtype": self.dtype,
            "nbytes": cell.nbytes,
            "cache": cell.cache,
            "busy": cell.busy,
            "time_s": cell.time_s,
            "low_s": low_s,
            "high_s": high_s,
            "algbw": cell.algbw,
            "busbw": self.busbw(cell),
            "wrong": cell.wrong,
            "bound_fraction": self.bound_fraction(cell),
            "samples": list(cell.samples),
        }


def times_faster(cell: Cell, counterpart: Cell) -> float:
    """Return how many times as long the other takes: the median of ratios within a round.

    Neighbours in time are compared, so what slows the whole machine for a while cancels out.

    >>> fast, slow = (Cell("any", 1024, "warm", False, samples, 0) for samples in ((1.0, 2.0), (2.0, 6.0)))
    >>> times_faster(fast, slow)
    2.5
    """
    return median(theirs / own for own, theirs in zip(cell.samples, counterpart.samples, strict=True))


def read_result(lines: Iterable[str], ranks: int, dtype: str, machine: dict[str, Any]) -> BenchResult:
    """The result that rank 0 wrote, line by line."""
    first, *comparisons, last = (json.loads(line) for line in lines)
    cells = tuple(_read_cell(fields) for line in comparisons for fields in line["cells"])
    # Beside the other facts on which the numbers depend.
    machine = machine | {"busy_cores_of_others": last["busy_cores"]}
    if last.get("gpu") is not None:
        machine["gpu"] = last["gpu"]
    return BenchResult(ranks, dtype, machine, first["memory_bandwidth"], in_order(cells))


def in_order(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Setting by setting, then by size; arms as they were lined up."""
    return tuple(sorted(cells, key=lambda cell: (cell.busy, cell.cache != "warm", cell.nbytes)))


def _read_cell(fields: dict[str, Any]) -> Cell:
    return Cell(**fields | {"samples": tuple(fields["samples"])})
