"""A run that gs.auto(save=FOLDER) kept, read back; whatever is wrong with it is one sentence.

FOLDER/cluster.toml   the links that the prediction was made with
FOLDER/profile.toml   the model's step
FOLDER/plan.toml      what ran
FOLDER/rank-N.jsonl   the trace: of its steps, those after the last choice count
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from gradsync.cli.plan.plan_inputs import load
from gradsync.cluster import Cluster
from gradsync.plan.pace_recipe import exchange_of
from gradsync.plan.sync_plan import Plan
from gradsync.planner.profile import ModelProfile
from gradsync.trace.reader import RankTrace, RunTrace
from gradsync.trace.reader import read_run as read_trace

_ENOUGH = 3  # steps
_NAMED = 3  # files that are missing


@dataclass(frozen=True)
class SavedRun:
    """The run that a folder holds; times are means over ranks of the middle of their steps."""

    cluster: Cluster
    profile: ModelProfile
    plan: Plan
    steps: int
    step_s: float
    exposed_s: float


def read_run(folder: Path) -> SavedRun:
    """Everything in the folder; a sentence if it is no run."""
    plan = load("--check", folder / "plan.toml", Plan.load)
    # Where steps differ on purpose, a median would forget the dear ones.
    middle = median if exchange_of(plan.pace).steps_alike else fmean
    trace = read_trace(folder)
    _check_ranks(trace)
    ranks = [_chosen_steps(folder, rank) for rank in trace.ranks.values()]
    run = SavedRun(
        load("--check", folder / "cluster.toml", Cluster.load),
        load("--check", folder / "profile.toml", ModelProfile.load),
        plan,
        min(len(steps) for steps in ranks),
        fmean(middle([step for step, _ in steps]) for steps in ranks),
        fmean(middle([exposed for _, exposed in steps]) for steps in ranks),
    )
    if run.step_s <= 0:
        raise ValueError(f"{folder / 'rank-0.jsonl'}: its steps took 0 s: there is nothing to compare with")
    if run.profile.compute_s <= 0:
        raise ValueError(f"{folder / 'profile.toml'}: a step computes for 0 s: there is nothing to put right")
    return run


def _check_ranks(trace: RunTrace) -> None:
    """Every rank that the headers speak of has a file."""
    missing = [f"rank-{rank}.jsonl" for rank in trace.missing]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ValueError(
            f"{trace.folder} holds no {', '.join(missing[:_NAMED])}{more} of {trace.world_size} ranks, or no trace in "
            "it: copy them here from their hosts"
        )


def _chosen_steps(folder: Path, rank: RankTrace) -> Sequence[tuple[float, float]]:
    """Seconds of each step after the last choice, and what of it was exposed; the first holds the switch itself."""
    after = rank.choices[-1].step if rank.choices else -1
    steps = [
        (step.step_s, min(max(0.0, step.exposed_s), step.step_s))
        for step in rank.steps
        if step.step > after and step.counts and step.step_s >= 0
    ]
    if len(steps) < _ENOUGH:
        raise ValueError(
            f"{folder / f'rank-{rank.run.rank}.jsonl'} holds {len(steps)} steps after the choice: at least {_ENOUGH} "
            "are needed"
        )
    return steps
