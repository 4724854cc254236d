"""The result of the arms, from the ranks' records; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from gradsync.cli.bench.hardware import cores
from gradsync.cli.bench.other_processes import disturbing
from gradsync.cli.demo.story.train_variants import ALONE, DDP, GRADSYNC, ONE, VARIANTS, DemoRecord
from gradsync.cli.demo.story.weight_distance import WeightDistance

Rounds = list[list[float]]  # seconds of each step, by round


@dataclass(frozen=True)
class Spread:
    """A median and the middle half around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class VariantComparison:
    """One arm's step time over another's, round by round.

    Neighbours in time are compared, so what slows the whole machine for a while cancels out.
    """

    ratio: Spread
    slower_rounds: int
    rounds: int

    @property
    def clear(self) -> bool:
        """True if so lopsided a count would come up in less than 1 of 20 runs if the arms were alike."""
        return abs(self.slower_rounds - self.rounds / 2) > 0.98 * math.sqrt(self.rounds)


@dataclass(frozen=True)
class DemoVariantResult:
    """One line of the table."""

    arm: str
    step_ms: Spread
    exposed_ms: float | None  # None for one process: it does the work of all ranks, so nothing is comparable
    sent_mb: float  # by each rank in each step
    validation_loss: float
    replicas: WeightDistance | None  # None where there is only one


@dataclass(frozen=True)
class DemoResult:
    """The whole table and what stands around it."""

    ranks: int
    threads_per_rank: int
    steps: int
    num_parameters: int
    loss_before: float
    arms: list[DemoVariantResult]
    gradsync_from_ddp: WeightDistance
    gradsync_over_ddp: VariantComparison
    one_process_over_gradsync: VariantComparison
    gradsync_waited_ms: float  # by its own count, of a step
    busy_cores_of_others: float = 0.0
    cores: int = 1

    @property
    def disturbed(self) -> bool:
        """True if others were at work enough that step times cannot be compared."""
        return disturbing(self.busy_cores_of_others)

    def arm(self, name: str) -> DemoVariantResult:
        return next(arm for arm in self.arms if arm.arm == name)

    def as_json(self) -> dict[str, Any]:
        return {"command": "demo", **asdict(self)}


def sum_up(records: Sequence[DemoRecord], threads: int, steps: int, num_parameters: int) -> DemoResult:
    """The result of a run, from what each rank wrote down."""
    first = records[0]
    assert first.from_ddp is not None
    times = {arm: _by_round(records, arm) for arm in VARIANTS}
    return DemoResult(
        ranks=len(records),
        threads_per_rank=threads,
        steps=steps,
        num_parameters=num_parameters,
        loss_before=first.loss_before,
        arms=[_line(arm, times, first) for arm in VARIANTS],
        gradsync_from_ddp=first.from_ddp,
        gradsync_over_ddp=compare(times[GRADSYNC], times[DDP]),
        one_process_over_gradsync=compare(times[ONE], times[GRADSYNC]),
        gradsync_waited_ms=1e3 * first.waited_s,
        busy_cores_of_others=first.busy_cores,
        cores=cores(),
    )


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles.

    >>> spread([1, 2, 3, 4, 9])
    Spread(median=3, low=2.0, high=4.0)
    """
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Spread(median(samples), low, high)


def compare(these: Rounds, those: Rounds) -> VariantComparison:
    """These steps against those.

    >>> compare([[2.0, 2.0], [3.0]], [[1.0], [4.0, 4.0]])
    VariantComparison(ratio=Spread(median=1.375, low=1.0625, high=1.6875), slower_rounds=1, rounds=2)
    """
    ratios = [median(a) / median(b) for a, b in zip(these, those, strict=True)]
    return VariantComparison(spread(ratios), sum(ratio > 1 for ratio in ratios), len(ratios))


def _by_round(records: Sequence[DemoRecord], arm: str) -> Rounds:
    """The steps of all ranks, by round; rounds in which none was timed are left out."""
    rounds = zip(*(record.rounds[arm] for record in records), strict=True)
    return [samples for ranks in rounds if (samples := [s for rank in ranks for s in rank])]


def _line(arm: str, times: dict[str, Rounds], first: DemoRecord) -> DemoVariantResult:
    step, alone = _step_ms(times[arm]), _step_ms(times[ALONE])
    return DemoVariantResult(
        arm,
        step,
        None if arm == ONE else step.median - alone.median,
        first.sent[arm] / 1e6,
        first.losses[arm],
        first.replicas.get(arm),
    )


def _step_ms(rounds: Rounds) -> Spread:
    return spread([1e3 * sample for samples in rounds for sample in samples])
