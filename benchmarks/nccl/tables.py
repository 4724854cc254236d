"""results.json for people: what was to be reached, then every cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import bench_harness
from nccl.arms import DDP
from nccl.forecasts import predicted_s
from nccl.parts import PARTS
from nccl.targets import Cells, Verdict, ratio, verdicts

_FEW = 5
_BEGIN, _END = "<!-- measured -->", "<!-- end -->"
_QUESTIONS = {
    "loopback": "All ranks on one host, over loopback, with MPS",
    "hosts": "Two hosts joined by a shaped link",
    "planner": "What the planner predicted",
    "host": "Host-bound: batch 1",
    "p2p": "One tensor, by each algorithm",
    "compile": "Compiled models",
}


def write(path: Path, results: dict[str, Cells]) -> None:
    """Put the tables between the marks of a README."""
    before, rest = path.read_text().split(_BEGIN)
    path.write_text(f"{before}{_BEGIN}\n\n{text(results)}\n\n{_END}{rest.split(_END)[1]}")


def text(results: dict[str, Cells]) -> str:
    parts = [f"## Targets\n\n{targets(verdicts(results))}"]
    parts += [f"## {_QUESTIONS[part]}\n\n{section(part, results[part])}" for part in PARTS if results.get(part)]
    return "\n\n".join(parts)


def targets(found: list[Verdict]) -> str:
    rows = [
        [each.part, each.cell.replace(" | ", ", "), each.what, _number(each.value), _bound(each), _answer(each.met)]
        for each in found
    ]
    return bench_harness.table(["part", "cell", "number", "measured", "target", "met"], rows)


def section(part: str, cells: Cells) -> str:
    """One part: a table of its cells, then what failed, then machines and commits."""
    header, rows = _p2p(cells) if part == "p2p" else _planner(cells) if part == "planner" else _steps(cells)
    blocks = [bench_harness.table(header, rows), *_profiles(cells)]
    problems = [f"- {name}: {line}" for name, cell in cells.items() for line in _problems(cell)]
    if problems:
        blocks.append("\n".join(problems).replace(" | ", ", "))
    blocks.append("\n".join(sorted({_where(cell) for cell in cells.values()})))
    return "\n\n".join(blocks)


def _steps(cells: Cells) -> tuple[list[str], list[list[str]]]:
    """Step times, with what was predicted where there was a probe."""
    rows = []
    for name, cell in cells.items():
        for arm, values in cell.get("medians", {}).items():
            if "wall_s" in values:
                slower, said = ratio(cell, arm, _base(cell, arm)), predicted_s(cell, arm)
                payload = cell["payload_nbytes"].get(arm, 0)
                rows.append(
                    [
                        *(name.replace(" | ", ", "), arm, _milliseconds(cell["samples"][arm]["wall_s"])),
                        f"{1e3 * values['cpu_s']:.1f}",
                        *(("–", "–") if slower is None else (f"{slower:.3f}", f"{1 / slower:.2f}")),
                        *(("–", "–") if said is None else (f"{1e3 * said:.1f}", _percent(said / values["wall_s"] - 1))),
                        f"{payload / 1e6:.1f}" if payload else "–",
                    ]
                )
    header = ["cell", "arm", "step ms (quartiles)", "CPU ms", "× DDP", "times as fast", "predicted ms", "error"]
    return [*header, "payload MB"], rows


def _base(cell: dict[str, Any], arm: str) -> str:
    """DDP compiled in the same way, where there is one."""
    like = f"{DDP},{arm.rpartition(',')[2]}"
    return like if arm.endswith("compiled") and like in cell["samples"] else DDP


def _planner(cells: Cells) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, cell in cells.items():
        for arm, values in cell["medians"].items():
            if (said := predicted_s(cell, arm)) is not None and "wall_s" in values:
                measured = values["wall_s"]
                times = [f"{1e3 * said:.1f}", f"{1e3 * measured:.1f}", _percent(said / measured - 1)]
                rows.append([*name.split(" | "), arm, *times])
    return ["link", "ranks", "model", "plan", "predicted ms", "measured ms", "error"], rows


def _p2p(cells: Cells) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, cell in cells.items():
        for algorithm in cell["medians"]:
            slower = ratio(cell, algorithm, "native")
            shown = _milliseconds(cell["samples"][algorithm]["wall_s"])
            rows.append([*name.split(" | "), algorithm, shown, "–" if slower is None else f"{slower:.2f}"])
    return ["ranks", "size", "algorithm", "ms (quartiles)", "× native"], rows


def _profiles(cells: Cells) -> Iterator[str]:
    for name, cell in cells.items():
        if "rows" in cell:
            rows = [
                [thread, f"`{_function(what)}`", f"{calls:.1f}", f"{own:.0f}", f"{total:.0f}"]
                for thread, what, calls, own, total in cell["rows"][:20]
            ]
            table = bench_harness.table(["thread", "function", "calls", "own µs", "total µs"], rows)
            yield f"{name.replace(' | ', ', ')}, by the step (the profiler's own cost included):\n\n{table}"


def _function(what: str) -> str:
    """Leave out the file and line, which are those of one commit; functions of C have none."""
    return what if what.startswith("C ") else what.partition(" ")[2]


def _problems(cell: dict[str, Any]) -> Iterator[str]:
    for arm, why in cell.get("failed", {}).items():
        yield f"{arm}: {why.splitlines()[0]}"
    if cell.get("problem"):
        yield cell["problem"].splitlines()[0]
    elif not cell.get("complete"):
        yield "fewer rounds than asked for"


def _where(cell: dict[str, Any]) -> str:
    machine = cell["machine"]
    facts = [machine.get("gpu", machine["cpu"]), f"{machine['cores']} cores", f"torch {machine['torch']}"]
    if "nccl" in machine:
        facts.append(f"NCCL {machine['nccl']}, {'with' if machine['mps'] else 'without'} MPS")
    facts.append(f"Python {machine['python']}")
    return f"- {', '.join(facts)}; commit {cell['commit']}{'; **dry, on CPU**' if cell.get('dry') else ''}"


def _milliseconds(samples: list[float]) -> str:
    """Median and quartiles; of few samples the range."""
    if len(samples) >= _FEW:
        return bench_harness.milliseconds(samples)
    return f"{1e3 * median(samples):.1f} ({1e3 * min(samples):.1f}–{1e3 * max(samples):.1f})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.3f}"


def _bound(verdict: Verdict) -> str:
    return f"{'≤' if verdict.at_most else '≥'} {verdict.target:g}"


def _answer(met: bool) -> str:
    return "yes" if met else "**no**"


def _percent(share: float) -> str:
    return f"{100 * share:+.0f} %"
