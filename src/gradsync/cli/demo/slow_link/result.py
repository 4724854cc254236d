"""What came of the arms over a slow link, from the ranks' ledgers; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradsync.cli.bench.hardware import cores
from gradsync.cli.bench.other_work import disturbing
from gradsync.cli.demo.slow_link.arms import ARMS, COMPRESSED
from gradsync.cli.demo.slow_link.train_over_link import LinkLedger
from gradsync.cli.demo.story.arms import DDP, GRADSYNC
from gradsync.cli.demo.story.result import Spread, spread
from gradsync.planner.losses import CLOSE, measured_loss


@dataclass(frozen=True)
class LinkArmResult:
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
    arms: list[LinkArmResult]
    busy_cores_of_others: float = 0.0
    cores: int = 1

    @property
    def disturbed(self) -> bool:
        """Whether others were at work enough that step times cannot be compared."""
        return disturbing(self.busy_cores_of_others)

    def arm(self, name: str) -> LinkArmResult:
        return next(arm for arm in self.arms if arm.arm == name)

    @property
    def compressed(self) -> list[LinkArmResult]:
        """Those that compress by gradsync, the fastest first."""
        return sorted((arm for arm in self.arms if arm.arm in COMPRESSED), key=lambda arm: arm.step_ms.median)

    @property
    def best(self) -> LinkArmResult:
        """The fastest whose loss was within 1 % of the exact one where that was measured: few steps prove nothing."""
        return next(arm for arm in self.compressed if arm.measured_worse is not None and arm.measured_worse <= CLOSE)

    @property
    def exact(self) -> LinkArmResult:
        """The faster of those that change nothing: what compression is to be compared with."""
        return min(self.arm(DDP), self.arm(GRADSYNC), key=lambda arm: arm.step_ms.median)

    def keeps_up(self, arm: LinkArmResult) -> bool:
        """Whether it learned as much as DDP in the same steps, but for a hundredth of the loss."""
        return arm.validation_loss <= 1.01 * self.arm(DDP).validation_loss

    def as_json(self) -> dict[str, Any]:
        return {"command": "demo --slow-link", **asdict(self)}


def sum_up(
    ledgers: Sequence[dict[str, LinkLedger]],
    rate: str,
    threads: int,
    steps: int,
    num_parameters: int,
    busy_cores: float = 0.0,
) -> LinkResult:
    """The result of a run, from what each rank wrote down."""
    times = {name: _step_ms([ledger[name] for ledger in ledgers]) for name in ARMS}
    arms = [_line(name, times, [ledger[name] for ledger in ledgers]) for name in ARMS]
    return LinkResult(rate, threads, steps, num_parameters, arms, busy_cores, cores())


def _line(name: str, times: dict[str, Spread], ranks: Sequence[LinkLedger]) -> LinkArmResult:
    loss = ranks[0].validation_loss
    assert loss is not None
    sent_mb = max(median(rank.sent_nbytes) for rank in ranks) / 1e6
    known = measured_loss(COMPRESSED[name]) if name in COMPRESSED else None
    worse = None if known is None else known.adamw  # with which the demo trains
    return LinkArmResult(name, times[name], times[DDP].median / times[name].median, sent_mb, loss, worse)


def _step_ms(ranks: Sequence[LinkLedger]) -> Spread:
    """A step ends with its last rank."""
    return spread([1e3 * max(same) for same in zip(*(rank.steps_s for rank in ranks), strict=True)])
