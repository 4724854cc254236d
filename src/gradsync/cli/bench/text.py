"""The result as a table in the manner of nccl-tests, and a few sentences around it."""

from __future__ import annotations

from itertools import groupby

from rich.table import Table

from gradsync.cli.bench.all_reduce_variants import VARIANTS
from gradsync.cli.bench.bench_config import Setting
from gradsync.cli.bench.bench_result import BenchResult, Cell, times_faster
from gradsync.cli.bench.other_processes import disturbance
from gradsync.cli.bench.sizes import show_size

_FOOTNOTE = (
    "time: median (middle half) of the longest rank; arms take turns call by call. algbw: bytes / time. "
    "busbw: algbw · 2(n−1)/n. bound: share of what the memory bandwidth allows, above 100 % where a cache does better. "
    "× {peer}: how many times as long {peer} took. wrong: elements that were not the exact sum, in all rounds on all "
    "ranks."
)


def footnote(result: BenchResult) -> str:
    """Return a footnote on what the columns say."""
    return _FOOTNOTE.format(peer=result.peer)


def tables(result: BenchResult) -> list[Table]:
    """A table for each setting."""
    groups = groupby(result.cells, key=lambda cell: cell.setting)
    return [_table(result, setting, list(cells)) for setting, cells in groups]


def sentences(result: BenchResult) -> list[str]:
    """Say what the arms are, how fast memory is, and whether all results were right."""
    arms = dict.fromkeys(cell.arm for cell in result.cells)
    told = ["; ".join(f"{arm}: {VARIANTS[arm].says}" for arm in arms) + "."]
    if result.memory_bandwidth is not None:
        told.append(
            f"{result.ranks} processes at once read and write memory at {result.memory_bandwidth / 1e9:.1f} GB/s; "
            "the bound is the time in which they could read and write every rank's bytes once."
        )
    if result.disturbed:
        told.append(
            f"{disturbance(result.machine['busy_cores_of_others'], result.machine['cores'])}: DO NOT COMPARE these "
            "times; run again when it is idle."
        )
    checked = sum(len(cell.samples) + 1 for cell in result.cells)
    bad = [cell for cell in result.cells if cell.wrong]
    if not bad:
        told.append(f"All {checked} results were right on every rank, element by element.")
    for cell in bad:
        told.append(f"{cell.arm} was WRONG at {show_size(cell.nbytes)}: {cell.wrong} elements; please report this.")
    return told


def show_seconds(seconds: float) -> str:
    """Three digits and a unit.

    >>> show_seconds(12.34e-6), show_seconds(0.00567), show_seconds(2.5)
    ('12.3 µs', '5.67 ms', '2.50 s')
    """
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def _table(result: BenchResult, setting: Setting, cells: list[Cell]) -> Table:
    grid = Table(title=_title(result, setting), title_justify="left", title_style="bold")
    grid.add_column("size", justify="right", no_wrap=True)
    grid.add_column("arm", no_wrap=True)
    for name in ("time", "algbw\nGB/s", "busbw\nGB/s", "bound", f"× {result.peer}", "wrong"):
        grid.add_column(name, justify="right", no_wrap=True)
    for nbytes, compared in groupby(cells, key=lambda cell: cell.nbytes):
        for index, cell in enumerate(compared):
            grid.add_row(show_size(nbytes) if index == 0 else "", *_row(result, cell))
        grid.add_section()
    return grid


def _row(result: BenchResult, cell: Cell) -> list[str]:
    low, high = cell.quartiles_s
    fraction = result.bound_fraction(cell)
    return [
        cell.arm,
        f"{show_seconds(cell.time_s)} ({show_seconds(low)} – {show_seconds(high)})",
        _three_digits(cell.algbw / 1e9),
        _three_digits(result.busbw(cell) / 1e9),
        "-" if fraction is None else f"{100 * fraction:.0f} %",
        "-" if cell.arm == result.peer else f"{times_faster(cell, result.counterpart(cell, result.peer)):.2f}",
        str(cell.wrong),
    ]


def _title(result: BenchResult, setting: Setting) -> str:
    main_thread = "busy in Python" if setting.busy else "idle"
    return f"{result.dtype} on {result.ranks} ranks, {setting.cache} caches, main thread {main_thread}"


def _three_digits(number: float) -> str:
    """
    >>> _three_digits(0.00123), _three_digits(0.0123), _three_digits(1.234), _three_digits(912.3)
    ('0.0012', '0.012', '1.23', '912')
    """
    limits = (0.00995, 0.995, 9.995, 99.95)
    decimals = 4 - sum(number >= limit for limit in limits)
    return f"{number:.{decimals}f}"
