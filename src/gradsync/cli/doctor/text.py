"""Findings as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text

from gradsync.cli.doctor.finding import Finding, Grade
from gradsync.cli.doctor.measured_links import MeasuredLinks
from gradsync.cli.doctor.rank_facts import Facts
from gradsync.cli.plan.figures import printable

_STYLES = {Grade.WRONG: "bold red", Grade.NOTE: "yellow", Grade.OK: "green"}
_SHOWN = {Grade.WRONG: "WRONG", Grade.NOTE: "note", Grade.OK: "ok"}
_INDENT = 7


def conclusion(findings: Sequence[Finding]) -> str:
    """The first line.

    >>> conclusion([Finding(Grade.OK, "versions", "fine")])
    'Nothing is wrong here.'
    >>> conclusion([Finding(Grade.WRONG, "MTUs differ", "", "ip ..."), Finding(Grade.NOTE, "idle cores", "", "...")])
    '1 thing is wrong: MTUs differ. 1 note.'
    """
    wrong = [finding.what for finding in findings if finding.grade == Grade.WRONG]
    notes = sum(finding.grade == Grade.NOTE for finding in findings)
    noted = "" if not notes else f" {notes} note{'s' if notes > 1 else ''}."
    if not wrong:
        return f"Nothing is wrong here.{noted}"
    count = "1 thing is wrong" if len(wrong) == 1 else f"{len(wrong)} things are wrong"
    return printable(f"{count}: {'; '.join(wrong)}.{noted}")


def tell(console: Console, findings: Sequence[Finding]) -> None:
    """The conclusion, then each finding with its fix."""
    worst = min((finding.grade for finding in findings), default=Grade.OK)
    console.print(Text(conclusion(findings), style="bold red" if worst == Grade.WRONG else "bold"))
    console.print()
    for finding in findings:
        line = Text(f"{_SHOWN[finding.grade]:{_INDENT}}", style=_STYLES[finding.grade])
        if finding.grade == Grade.OK:
            console.print(line + Text(printable(f"{finding.what}: {finding.detail}"), style="default"), soft_wrap=True)
            continue
        console.print(line + Text(printable(finding.what), style="bold"), soft_wrap=True)
        for part in wrap(printable(finding.detail), max(20, console.width - _INDENT)):
            console.print(Text(f"{'':{_INDENT}}{part}"), soft_wrap=True)
        # Never wrapped: it is there to be copied.
        console.print(Text(f"{'':{_INDENT}}fix: {printable(finding.fix)}", style="cyan"), soft_wrap=True)


def as_json(findings: Sequence[Finding], facts: Sequence[Facts], measured: MeasuredLinks | None) -> dict[str, Any]:
    """The findings for machines."""
    found = measured or MeasuredLinks()
    return {
        "command": "doctor",
        "conclusion": conclusion(findings),
        "num_wrong": sum(finding.grade == Grade.WRONG for finding in findings),
        "num_notes": sum(finding.grade == Grade.NOTE for finding in findings),
        "findings": [{**finding._asdict(), "grade": finding.grade.name.lower()} for finding in findings],
        "links": [link._asdict() for link in found.links],
        "clocks": [each._asdict() for each in found.clocks],
        "ranks": [each.record() for each in facts],
    }
