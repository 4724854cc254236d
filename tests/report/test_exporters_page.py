"""The table of docs/exporters.md has every metric."""

from __future__ import annotations

import re
from pathlib import Path

from gradsync.report.exporters.metrics import families
from gradsync.report.slow_links import SlowLink
from gradsync.report.slow_ranks import Blame
from gradsync.report.summary import Summary
from gradsync.trace.lines import Error, Health
from made_runs import made_run

PAGE = Path(__file__).parent.parent.parent / "docs" / "exporters.md"


def test_the_page_has_every_metric() -> None:
    bad, lost = Health(1, "drift", [0], None, None, ""), Error(9, "PeerLost", [1], None, "")
    made = made_run(ranks=2, steps=9, ratio=2.0, health=(bad,), errors={0: lost})
    blame = Blame(1, "a", "input", 40, 50, 0.03, 0.5, 0.2, "late", "look")
    link = SlowLink(0, "a", 1, "b", "10.0.0.2", 1e6, 1e8, "slow", "look")
    found = families(made, Summary("", blame=[blame], links=[link], numbers={"overhead": 0.1}))
    names = {family.name + ("_total" if family.counts else "") for family in found}
    rows = "".join(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `gradsync_"))
    assert names == set(re.findall(r"`(gradsync_\w+)`", rows))
