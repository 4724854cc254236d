"""Names that a file may hold to break a page or a terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gradsync.trace.lines import Error, Health, StepPart
from gradsync.trace.reader import RunTrace
from made_runs import made_run, write_run

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "</title></style></svg><svg onload=alert(1)>",
    "\"'><b onmouseover='alert(1)'>&lt;&#60;",
    "]]><!--",
    "javascript:alert(1)",
    "\x00\x07\x1b[2J\x1b]0;owned\x07\r\n\x85\u2028",
    "\u202egnp.exe\u2066\u200f\ufeff",
    "half a letter \ud800",
    "{{7*7}}${7*7}%s%n",
    "x" * 10_000,
    "<" * 10_000,
    "",
)


def hostile_run(text: str, ranks: int = 2, steps: int = 12, phase: str | None = None) -> RunTrace:
    """A run in which everything that can be a name is this one."""
    health = (Health(3, text, [1], text, 2, text),)
    run = made_run(ranks, steps, hosts=1, names=(text,), slow={1: {"input": 0.05}}, health=health, ratio=4.0)
    for trace in run.ranks.values():
        trace.errors.append(Error(steps, text, [0], 0, text))
        trace.run = replace(
            trace.run, device=text, source=text, gradsync=text, torch=text,
            parameters=[(text, shape, text) for _, shape, _ in trace.run.parameters],
        )  # fmt: skip
        trace.layouts = [
            replace(layout, buckets=[bucket._replace(compressor=text) for bucket in layout.buckets])
            for layout in trace.layouts
        ]
        trace.steps = [
            replace(
                step, held_up_by=text, phases=[*step.phases, StepPart(text if phase is None else phase, 0.0, 0.001)]
            )
            for step in trace.steps
        ]
        for stats in trace.stats:
            stats.stats[text] = text
    return run


def hostile_folder(folder: Path, text: str) -> Path:
    """The same as files; also names of phases, which no writer of ours would get wrong."""
    write_run(folder, hostile_run(text, phase="PHASE"))
    for path in folder.glob("*.jsonl"):
        path.write_text(path.read_text("utf-8").replace('"PHASE"', json.dumps(text)), encoding="utf-8")
    return folder
