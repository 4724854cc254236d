"""Every Python block of docs/auto.md runs, in order, on two ranks; the log lines it shows are those of the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

import gradsync as gs
from gradsync.compress.cast import bf16
from gradsync.engine.announcing import choice, miss
from gradsync.planner.prediction import Prediction

PAGE = (Path(__file__).parent.parent / "docs" / "auto.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def check_blocks(blocks: list[str], folder: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    names: dict[str, Any] = {"gs": gs, "model": model, "optimizer": optimizer, "folder": Path(folder)}
    names["batch"] = torch.randn(6, 8)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        for block in blocks:
            exec(compile(block, "docs/auto.md", "exec"), names)


def test_its_blocks_run(run: Callable[..., Any], tmp_path: Path) -> None:
    assert len(BLOCKS) == 5
    link = gs.Link(1e-5, 1e9)
    gs.Cluster(((0,), (1,)), link, link).save(tmp_path / "cluster.toml")
    run(check_blocks, BLOCKS, str(tmp_path))


def test_it_shows_what_the_log_says() -> None:
    lines = re.findall(r"^gradsync: (.*)$", PAGE, re.MULTILINE)
    reasons = (
        "2.0 times fewer bytes: saves 39 ms of 48.9 ms",
        "communication fits into backward: compressing would buy nothing",
    )
    chosen = _prediction(gs.Plan(compress=bf16()), 0.0812, 0.12, reasons[0])
    default = _prediction(gs.Plan(), 0.12, 0.4, "")
    assert lines[0] == choice(chosen, default, 6, calibrated=True)
    kept = _prediction(gs.Plan(), 0.0714, 0.01, reasons[1])
    assert lines[1] == choice(kept, kept, 6, calibrated=True)
    assert lines[2] == miss(0.14, 0.0812, 206, 5)


def _prediction(plan: gs.Plan, step_s: float, overhead: float, reason: str) -> Prediction:
    return Prediction(plan, step_s, step_s, step_s, step_s, overhead * step_s, 0, 0, "exact", reason)
