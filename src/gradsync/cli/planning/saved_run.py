"""A run that gs.auto(save=FOLDER) kept, read back; whatever is wrong with it is one sentence.

FOLDER/cluster.toml   the links that the prediction was made with
FOLDER/profile.toml   the model's step
FOLDER/plan.toml      what ran
FOLDER/rank-N.jsonl   a header, then a line per step: {"step": 7, "step_s": 0.035, "exposed_s": 0.004}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from gradsync.cli.planning.question import load
from gradsync.links import Cluster
from gradsync.paces import Delayed, EveryStep
from gradsync.plan import Plan
from gradsync.planner.profile import ModelProfile

_ENOUGH = 3  # steps
_TWO_CLOCKS = 1.5  # a GPU takes the time of waiting, the host that of the step: of one step they may differ
_FORMAT = 1  # of the steps' files, as engine.diary writes them
_NAMED = 3  # files that are missing
_MOST_RANKS = 1_000_000
_LONGEST_S = 1e9  # a step; what is more was not measured


@dataclass(frozen=True)
class Run:
    """What a folder holds; times are means over ranks of the middle of their steps."""

    cluster: Cluster
    profile: ModelProfile
    plan: Plan
    steps: int
    step_s: float
    exposed_s: float


def read_run(folder: Path) -> Run:
    """Everything in the folder; a sentence if it is no run."""
    plan = load("--check", folder / "plan.toml", Plan.load)
    # Where steps differ on purpose, a median would forget the dear ones.
    seldom = not isinstance(plan.pace, EveryStep | Delayed)
    files = sorted(folder.glob("rank-*.jsonl"))
    if not files:
        raise ValueError(
            f"{folder} holds no rank-0.jsonl: a run is saved by gs.attach(model, optimizer, gs.auto(save=folder))"
        )
    _check_ranks(folder, [load("--check", path, _read_world_size) for path in files])
    ranks = [load("--check", path, _read_steps) for path in files]
    middle = fmean if seldom else median
    run = Run(
        load("--check", folder / "cluster.toml", Cluster.load),
        load("--check", folder / "profile.toml", ModelProfile.load),
        plan,
        min(len(steps) for steps in ranks),
        fmean(middle([step for step, _ in steps]) for steps in ranks),
        fmean(middle([exposed for _, exposed in steps]) for steps in ranks),
    )
    if run.step_s <= 0:
        raise ValueError(f"{files[0]}: its steps took 0 s: there is nothing to compare with")
    if run.profile.compute_s <= 0:
        raise ValueError(f"{folder / 'profile.toml'}: a step computes for 0 s: there is nothing to put right")
    return run


def _check_ranks(folder: Path, world_sizes: Sequence[int]) -> None:
    """Every rank that the headers speak of has a file."""
    size = max(world_sizes)
    missing = [f"rank-{rank}.jsonl" for rank in range(size) if not (folder / f"rank-{rank}.jsonl").exists()]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ValueError(
            f"{folder} holds no {', '.join(missing[:_NAMED])}{more} of {size} ranks: copy them here from their hosts"
        )


def _read_world_size(path: Path) -> int:
    """From the header; 0 if it does not say."""
    try:
        with path.open(encoding="utf-8") as file:
            header = json.loads(file.readline())
        size = header.get("world_size", 0)
    except (ValueError, RecursionError, AttributeError):
        return 0  # what is wrong with the file is said when its steps are read
    if type(size) is not int or not 0 <= size <= _MOST_RANKS:
        raise ValueError(f"{path}: world_size must be a whole number up to {_MOST_RANKS:,}, got {size!r}")
    return size


def _read_steps(path: Path) -> Sequence[tuple[float, float]]:
    """Seconds of each step and what of it was exposed; the last line may be cut off, as the run may have been."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no file of steps: it is not text ({error.reason})") from None
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and number > 1:
                break
            raise ValueError(f"{path}: line {number} is not JSON: {line[:40]!r}") from None
        if number == 1:
            if not isinstance(row, dict) or row.get("format") != _FORMAT:
                raise ValueError(f'{path}: the first line must say "format": {_FORMAT}, got {line[:60]!r}')
        elif not isinstance(row, dict) or not _is_time(row.get("step_s")) or not _is_time(row.get("exposed_s")):
            raise ValueError(f"{path}: line {number} needs step_s and exposed_s, in seconds, got {line[:60]!r}")
        elif row["exposed_s"] > _TWO_CLOCKS * row["step_s"]:
            raise ValueError(f"{path}: line {number} waits longer (exposed_s) than its step takes, got {line[:60]!r}")
        else:
            steps.append((float(row["step_s"]), float(min(row["exposed_s"], row["step_s"]))))
    if len(steps) < _ENOUGH:
        raise ValueError(f"{path} holds {len(steps)} steps: at least {_ENOUGH} are needed")
    return steps


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST_S
