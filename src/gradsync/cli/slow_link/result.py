"""What came of the arms over a slow link, from the ranks' ledgers; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradsync.cli.slow_link.arms import ARMS, COMPRESSED
from gradsync.cli.slow_link.crossing import Ledger
from gradsync.cli.story.arms import DDP, GRADSYNC
from gradsync.cli.story.result import Spread, spread


@dataclass(frozen=True)
class ArmResult:
    """One line of the table."""

    arm: str
    step_ms: Spread
    times_as_fast_as_ddp: float
    sent_mb: float  # by each rank in each step, without headers
    validation_loss: float


@dataclass(frozen=True)
class Result:
    """The whole table and what stands around it."""

    rate: str
    threads_per_rank: int
    steps: int
    num_parameters: int
    arms: list[ArmResult]

    def arm(self, name: str) -> ArmResult:
        return next(arm for arm in self.arms if arm.arm == name)

    @property
    def compressed(self) -> list[ArmResult]:
        """Those that compress by gradsync, the fastest first."""
        return sorted((arm for arm in self.arms if arm.arm in COMPRESSED), key=lambda arm: arm.step_ms.median)

    @property
    def best(self) -> ArmResult:
        """The fastest that compresses and keeps up; the fastest at all where none does."""
        return next((arm for arm in self.compressed if self.keeps_up(arm)), self.compressed[0])

    @property
    def exact(self) -> ArmResult:
        """The faster of those that change nothing: what compression is to be compared with."""
        return min(self.arm(DDP), self.arm(GRADSYNC), key=lambda arm: arm.step_ms.median)

    def keeps_up(self, arm: ArmResult) -> bool:
        """Whether it learned as much as DDP in the same steps, but for a hundredth of the loss."""
        return arm.validation_loss <= 1.01 * self.arm(DDP).validation_loss

    def as_json(self) -> dict[str, Any]:
        return {"command": "demo --slow-link", **asdict(self)}


def sum_up(ledgers: Sequence[dict[str, Ledger]], rate: str, threads: int, steps: int, num_parameters: int) -> Result:
    """The result of a run, from what each rank wrote down."""
    times = {name: _step_ms([ledger[name] for ledger in ledgers]) for name in ARMS}
    arms = [_line(name, times, [ledger[name] for ledger in ledgers]) for name in ARMS]
    return Result(rate, threads, steps, num_parameters, arms)


def _line(name: str, times: dict[str, Spread], ranks: Sequence[Ledger]) -> ArmResult:
    loss = ranks[0].validation_loss
    assert loss is not None
    sent_mb = max(median(rank.sent_nbytes) for rank in ranks) / 1e6
    return ArmResult(name, times[name], times[DDP].median / times[name].median, sent_mb, loss)


def _step_ms(ranks: Sequence[Ledger]) -> Spread:
    """A step ends with its last rank."""
    return spread([1e3 * max(same) for same in zip(*(rank.steps_s for rank in ranks), strict=True)])
