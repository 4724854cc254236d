"""Arms that take turns: A B C A B C …, until there are enough rounds or the time is over.

once        all arms are made first, each with a replica of its own, and take turns
each turn   the arm of a turn is attached, warmed up, measured and detached
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from nccl.arms import NO_SYNC, Arm, Replica
from nccl.crew import Crew, Measured
from nccl.models import Workload

Samples = dict[str, dict[str, list[float]]]  # by arm: wall_s and cpu_s of each round
Turn = Callable[[], Measured]


class Course(NamedTuple):
    """How much is measured."""

    rounds: int
    window: int  # steps that make one sample
    warm_up: int
    each_turn: bool = False


class Contest:
    """The arms of one workload, and what came of them."""

    def __init__(self, crew: Crew, workload: Workload, course: Course) -> None:
        self.crew, self.workload, self.course = crew, workload, course
        self.failed: dict[str, str] = {}
        self.ready_s: dict[str, float] = {}
        self.payload_nbytes: dict[str, int] = {}
        self._twin = self._make(Arm(NO_SYNC), None)
        self._twin.prime()
        self._running: list[Replica] = []

    def run(self, arms: Sequence[Arm], tell: Callable[[Samples], None] = lambda samples: None) -> Samples:
        """Let them take turns. An arm that fails on some rank is left out on all."""
        turns = {arm.label: turn for arm in arms if (turn := self._turn(arm)) is not None}
        return take_turns(self.crew, turns, self.course.rounds, self.failed, tell)

    def finish(self) -> None:
        """End what runs: no rank leaves before the others have all they wait for."""
        for replica in self._running:
            self.crew.meet()
            replica.end()
        self._running.clear()

    def _turn(self, arm: Arm) -> Turn | None:
        if self.course.each_turn:
            return lambda: self._whole_turn(arm)
        if self.crew.over():
            self.failed[arm.label] = "no time was left"
            return None
        begun, problem = time.perf_counter(), ""
        replica = self._make(arm, None if arm.name == NO_SYNC else self._twin)
        try:
            self._warm(replica)
        except Exception as error:  # an arm less, and why
            problem = f"{type(error).__name__}: {str(error)[:600]}"
        if problem := self.crew.agree(problem):
            self.failed[arm.label] = problem
            self.crew.note(f"{arm.label} left out: {problem}")
            return None
        self._running.append(replica)
        self._note(arm, replica, time.perf_counter() - begun)
        return lambda: self.crew.timed(replica.step, self.course.window)

    def _whole_turn(self, arm: Arm) -> Measured:
        begun = time.perf_counter()
        replica = self._make(arm, None if arm.name == NO_SYNC else self._twin)
        self._warm(replica)
        self._note(arm, replica, time.perf_counter() - begun)
        measured = self.crew.timed(replica.step, self.course.window)
        self.crew.meet()
        replica.end()
        self.crew.meet()
        return measured

    def _make(self, arm: Arm, twin: Replica | None) -> Replica:
        return Replica(self.crew, self.workload, arm, twin)

    def _warm(self, replica: Replica) -> None:
        replica.begin()
        for _ in range(self.course.warm_up):
            replica.step()
        self.crew.settle()

    def _note(self, arm: Arm, replica: Replica, seconds: float) -> None:
        self.ready_s[arm.label] = round(seconds, 2)
        if replica.sync is not None:
            self.payload_nbytes[arm.label] = int(replica.sync.stats()["nbytes"] or 0)


def take_turns(
    crew: Crew, turns: dict[str, Turn], rounds: int, failed: dict[str, str], tell: Callable[[Samples], None]
) -> Samples:
    """`rounds` samples of each, fewer if the time does not allow for one more; `tell` is told after every round."""
    samples: Samples = {name: {"wall_s": [], "cpu_s": []} for name in turns}
    names, longest_s = list(turns), 0.0
    for number in range(rounds if names else 0):  # there may have been no time to make any
        if number and crew.over(longest_s):
            break
        begun = time.perf_counter()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            measured = turns[name]()
            samples[name]["wall_s"].append(round(measured.wall_s, 7))
            samples[name]["cpu_s"].append(round(measured.cpu_s, 7))
        tell(samples)
        longest_s = max(longest_s, crew.most(time.perf_counter() - begun)[0])
    return samples


def medians(samples: Samples) -> dict[str, dict[str, float]]:
    return {name: {key: median(values) for key, values in each.items() if values} for name, each in samples.items()}


def as_facts(contest: Contest, samples: Samples) -> dict[str, Any]:
    """What a file keeps of a contest."""
    return {
        "samples": samples,
        "medians": medians(samples),
        "failed": contest.failed,
        "ready_s": contest.ready_s,
        "payload_nbytes": contest.payload_nbytes,
        "course": contest.course._asdict(),
    }
