"""Every Python block of docs/choosing.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import gradsync as gs
from gradsync.paces import KINDS, canonical

PAGE = (Path(__file__).parent.parent / "docs" / "choosing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_its_blocks_run() -> None:
    assert len(BLOCKS) > 1
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/choosing.md", "exec"), names)


def test_it_shows_every_pace() -> None:
    plans = [eval(line.split("  #")[0], {"gs": gs}) for line in BLOCKS[0].splitlines() if line.startswith("gs.Plan")]
    assert {canonical(plan.pace)["kind"] for plan in plans} == set(KINDS)
    assert all(f"`{kind}(" in PAGE for kind in KINDS)
