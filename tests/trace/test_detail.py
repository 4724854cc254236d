"""Which steps are told bucket by bucket: as many as promised, whatever training does every so many steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync.trace.lines import RunHeader
from gradsync.trace.reader import read_run
from gradsync.trace.timers import HostTimer
from gradsync.trace.tracer import FIRST, BucketMoments, Tracer, is_detailed
from gradsync.trace.writer import Writer


@pytest.mark.parametrize("every", [2, 3, 5, 8, 10, 13, 20, 50, 89, 100, 144, 1000])
def test_detailed_steps_are_in_step_with_nothing(every: int) -> None:
    steps = range(50, 100_050)
    whole = sum(map(is_detailed, steps)) / len(steps)
    due = [step for step in steps if step % every == 0]
    assert whole == pytest.approx(0.1, abs=1e-6)
    assert sum(map(is_detailed, due)) / len(due) == pytest.approx(0.1, abs=4 * (0.09 / len(due)) ** 0.5)
    assert all(any(map(is_detailed, range(ten, ten + 10))) for ten in range(0, 1000, 10))


def trace(folder: Path, rank: int, steps: range) -> set[int]:
    """The steps that such a rank told bucket by bucket."""
    run = RunHeader(rank, 2, "a", 1, 1.0, 1.0, "gradsync", "cpu", None, [])
    tracer = Tracer(Writer(folder, run), None, HostTimer())
    tracer.continue_at(steps[0])
    for step in steps:
        tracer.over(step, True, [BucketMoments(0, 8)])
    tracer.close("detach")
    return {step.step for step in read_run(folder).ranks[rank].steps if step.buckets is not None}


@pytest.mark.parametrize("first", [0, 1037])
def test_all_ranks_tell_the_first_steps_and_then_the_same_ones(tmp_path: Path, first: int) -> None:
    steps = range(first, first + 400)
    told = trace(tmp_path, 0, steps)
    assert told == {*steps[:FIRST]} | {step for step in steps[FIRST:] if is_detailed(step)}
    assert told == trace(tmp_path, 1, steps)
