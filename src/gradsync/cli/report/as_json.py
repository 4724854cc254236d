"""A report as JSON: the fields are a promise, told in docs/report.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gradsync.report.compare import Comparison
from gradsync.report.summary import Summary

VERSION = 1  # goes up when a field changes its meaning or goes away; new ones may come at any time


def as_json(summary: Summary, name: str) -> dict[str, Any]:
    """Everything that is printed, and every number."""
    return {"command": "report", "version": VERSION, **_run(summary, name)}


def both_as_json(first: Summary, second: Summary, comparison: Comparison, names: tuple[str, str]) -> dict[str, Any]:
    """Two runs, each as it would be alone."""
    return {
        "command": "report",
        "version": VERSION,
        "verdict": comparison.verdict,
        "rows": [row._asdict() for row in comparison.rows],
        "runs": [_run(first, names[0]), _run(second, names[1])],
    }


def _run(summary: Summary, name: str) -> dict[str, Any]:
    return {
        "run": name,
        "verdict": summary.verdict,
        "numbers": summary.numbers,
        "blame": [each._asdict() for each in summary.blame],
        "links": [each._asdict() for each in summary.links],
        "errors": [asdict(each) for each in summary.errors],
        "health": [asdict(each) for each in summary.health],
        "warnings": [each._asdict() for each in summary.warnings],
        "facts": [each._asdict() for each in summary.facts],
    }
