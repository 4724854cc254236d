"""The losses that the package knows are those of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import gradsync as gs
from gradsync.planner.losses import _MEASURED, SOURCE, Loss, measured_loss

RESULTS = Path(__file__).parents[2] / "benchmarks" / "slow_link" / "results.json"
FOLDER, CELL = SOURCE.split(", ", 1)
ARMS = {
    gs.bf16(): "bf16",
    gs.int8(): "int8",
    gs.int4(): "int4",
    gs.sign(): "sign",
    gs.powersgd(4): "powersgd 4",
    gs.powersgd(16): "powersgd 16",
    gs.topk(0.01): "topk 1 %",
    gs.randomk(0.01): "randomk 1 %",
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())["loss"]
    return found


def worse(runs: dict[str, Any], arm: str, optimizer: str) -> float | None:
    """By seed, then the mean of all three; None if that arm was not run."""
    cell = CELL + (f", {optimizer}" if optimizer == "sgd" else "")

    def of(name: str, seed: int) -> float | None:
        run = runs.get(f"{cell} | {name} | seed {seed}")
        return None if run is None else float(run["final_held_out"])

    pairs = [(of(f"gradsync, {arm}", seed), of("gradsync", seed)) for seed in range(3)]
    shares = [ours / exact - 1 for ours, exact in pairs if ours is not None and exact is not None]
    return mean(shares) if len(shares) == 3 else None


@pytest.mark.parametrize("number", range(len(_MEASURED)))
def test_what_is_known_of_a_loss_is_what_was_measured(number: int, runs: dict[str, Any]) -> None:
    recipe, loss = _MEASURED[number]
    arm = ARMS[recipe]
    assert loss.adamw == pytest.approx(worse(runs, arm, "adamw"), abs=5e-5)
    sgd = worse(runs, arm, "sgd")
    assert (loss.sgd is None) == (sgd is None)
    if sgd is not None:
        assert loss.sgd == pytest.approx(sgd, abs=5e-5)


def test_the_source_is_there() -> None:
    assert RESULTS.parent == RESULTS.parents[2] / FOLDER


def test_across_hosts_is_the_same_loss_and_the_unknown_is_none() -> None:
    assert measured_loss(gs.across_hosts(gs.int4())) == measured_loss(gs.int4())
    assert measured_loss(gs.topk(0.37)) is None
    assert measured_loss(None) == Loss(0.0, 0.0)
