"""The log lines that docs/auto.md shows are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import gradsync as gs
from gradsync.autotune.decide import describe_choice, describe_miss
from gradsync.compress.cast import bf16
from gradsync.planner.prediction import Prediction

PAGE = (Path(__file__).parents[2] / "docs" / "auto.md").read_text()


def test_it_shows_what_the_log_says() -> None:
    lines = re.findall(r"^gradsync: (.*)$", PAGE, re.MULTILINE)
    reasons = (
        "2.0 times fewer bytes: saves 39 ms of 48.9 ms",
        "communication fits into backward: compressing would buy nothing",
    )
    chosen = _prediction(gs.Plan(compress=bf16()), 0.0812, 0.12, reasons[0])
    default = _prediction(gs.Plan(), 0.12, 0.4, "")
    assert lines[0] == describe_choice(chosen, default, 6, calibrated=True)
    kept = _prediction(gs.Plan(), 0.0714, 0.01, reasons[1])
    assert lines[1] == describe_choice(kept, kept, 6, calibrated=True)
    assert lines[2] == describe_miss(0.14, 0.0812, 206, 5)


def _prediction(plan: gs.Plan, step_s: float, overhead: float, reason: str) -> Prediction:
    return Prediction(plan, step_s, step_s, step_s, step_s, overhead * step_s, 0, 0, "exact", reason)
