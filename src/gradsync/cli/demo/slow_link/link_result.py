"""The result of the arms over a slow link, from the ranks' records; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradsync.cli.bench.hardware import cores
from gradsync.cli.bench.other_processes import disturbing
from gradsync.cli.demo.slow_link.link_variants import COMPRESSED, VARIANTS
from gradsync.cli.demo.slow_link.train_over_link import LinkRecord
from gradsync.cli.demo.story.demo_result import Spread, spread
from gradsync.cli.demo.story.train_variants import DDP, GRADSYNC
from gradsync.planner.losses import CLOSE, measured_loss


@dataclass(frozen=True)
class LinkVariantResult:
    """One line of the table."""

    arm: str
    step_ms: Spread
    times_as_fast_as_ddp: float
    sent_mb: float  # by each rank in each step, without headers
    validation_loss: float
    measured_worse: float | None = (
        None  # by which share the loss was higher after 1000 steps; None: no compressor of ours
    )


@dataclass(frozen=True)
class LinkResult:
    """The whole table and what stands around it."""

    rate: str
    threads_per_rank: int
    steps: int
    num_parameters: int
    arms: list[LinkVariantResult]
    busy_cores_of_others: float = 0.0
    cores: int = 1

    @property
    def disturbed(self) -> bool:
        """True if others were at work enough that step times cannot be compared."""
        return disturbing(self.busy_cores_of_others)

    def arm(self, name: str) -> LinkVariantResult:
        return next(arm for arm in self.arms if arm.arm == name)

    @property
    def compressed(self) -> list[LinkVariantResult]:
        """The arms that compress by gradsync, the fastest first."""
        return sorted((arm for arm in self.arms if arm.arm in COMPRESSED), key=lambda arm: arm.step_ms.median)

    @property
    def best(self) -> LinkVariantResult:
        """The fastest whose loss was within 1 % of the exact one where that was measured: few steps prove nothing."""
        return next(arm for arm in self.compressed if arm.measured_worse is not None and arm.measured_worse <= CLOSE)

    @property
    def exact(self) -> LinkVariantResult:
        """The faster of those that change nothing: what compression is to be compared with."""
        return min(self.arm(DDP), self.arm(GRADSYNC), key=lambda arm: arm.step_ms.median)

    def keeps_up(self, arm: LinkVariantResult) -> bool:
        """Return whether an arm learned as much as DDP in the same steps, but for a hundredth of the loss."""
        return arm.validation_loss <= 1.01 * self.arm(DDP).validation_loss

    def as_json(self) -> dict[str, Any]:
        return {"command": "demo --slow-link", **asdict(self)}


def sum_up(
    records: Sequence[dict[str, LinkRecord]],
    rate: str,
    threads: int,
    steps: int,
    num_parameters: int,
    busy_cores: float = 0.0,
) -> LinkResult:
    """The result of a run, from what each rank wrote down."""
    times = {name: _step_ms([record[name] for record in records]) for name in VARIANTS}
    arms = [_line(name, times, [record[name] for record in records]) for name in VARIANTS]
    return LinkResult(rate, threads, steps, num_parameters, arms, busy_cores, cores())


def _line(name: str, times: dict[str, Spread], ranks: Sequence[LinkRecord]) -> LinkVariantResult:
    loss = ranks[0].validation_loss
    assert loss is not None
    sent_mb = max(median(rank.sent_nbytes) for rank in ranks) / 1e6
    known = measured_loss(COMPRESSED[name]) if name in COMPRESSED else None
    worse = None if known is None else known.adamw  # with which the demo trains
    return LinkVariantResult(name, times[name], times[DDP].median / times[name].median, sent_mb, loss, worse)


def _step_ms(ranks: Sequence[LinkRecord]) -> Spread:
    """A step ends with its last rank."""
    return spread([1e3 * max(same) for same in zip(*(rank.steps_s for rank in ranks), strict=True)])
