"""docs/choosing.md shows every pace."""

from __future__ import annotations

import re
from pathlib import Path

import gradsync as gs
from gradsync.plan.paces import KINDS, canonical

PAGE = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()
FIRST_BLOCK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]


def test_it_shows_every_pace() -> None:
    plans = [eval(line.split("  #")[0], {"gs": gs}) for line in FIRST_BLOCK.splitlines() if line.startswith("gs.Plan")]
    assert {canonical(plan.pace)["kind"] for plan in plans} == set(KINDS)
    assert all(f"`{kind}(" in PAGE for kind in KINDS)
