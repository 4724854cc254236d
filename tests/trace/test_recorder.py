"""What a step cost: times that add up, medians over the kept steps, and who held the buckets up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.trace import Recorder
from gradsync.trace.recorder import _union

KEYS = {
    "steps", "step_s", "compute_s", "comm_s", "exposed_s", "nbytes", "sent_nbytes", "num_buckets", "held_up_by",
    "held_up_steps",
}  # fmt: skip
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), max_size=12)


def record(recorder: Recorder, step: int, nbytes: int = 100, held_up_by: str | None = None, wait: bool = True) -> None:
    if wait:
        recorder.start_waiting(on_device=False)
    recorder.finish_step(step, [(0.0, 1.0), (0.5, 2.0)], nbytes, 3, held_up_by)


@given(spans)
def test_time_under_way_counts_every_moment_once(intervals: list[tuple[int, int]]) -> None:
    moments = {moment for start, stop in intervals for moment in range(start, stop)}
    assert _union(intervals) == len(moments)


def test_a_step_is_its_computing_and_its_waiting() -> None:
    recorder = Recorder()
    record(recorder, 0)
    (step,) = recorder.records()
    assert step.step_s == pytest.approx(step.compute_s + step.exposed_s)
    assert 0 <= step.exposed_s <= step.step_s
    assert (step.comm_s, step.nbytes, step.num_buckets) == (2.0, 100, 3)


def test_a_step_that_never_waited_exposed_nothing() -> None:
    recorder = Recorder()
    record(recorder, 0)
    record(recorder, 1, wait=False)
    assert recorder.records()[1].exposed_s == 0.0


def test_only_the_last_steps_are_kept_but_all_are_counted() -> None:
    recorder = Recorder(keep=4)
    for step in range(10):
        record(recorder, step)
    assert [r.step for r in recorder.records()] == [6, 7, 8, 9]
    assert recorder.count == recorder.stats()["steps"] == 10


def test_stats_are_medians_without_the_first_step() -> None:
    recorder = Recorder()
    for step, nbytes in enumerate([10**9, 1, 2, 6]):
        record(recorder, step, nbytes)
    assert recorder.stats()["nbytes"] == 2


def test_the_first_step_counts_while_it_is_the_only_one() -> None:
    recorder = Recorder()
    record(recorder, 0, 10**9)
    assert recorder.stats()["nbytes"] == 10**9


def test_a_first_step_that_was_dropped_from_memory_is_not_left_out_again() -> None:
    recorder = Recorder(keep=2)
    for step, nbytes in enumerate([100, 1, 3]):
        record(recorder, step, nbytes)
    assert recorder.stats()["nbytes"] == 2


def test_the_parameter_that_held_up_most_steps_is_named() -> None:
    recorder = Recorder()
    for step, name in enumerate([None, "head", "emb", None, "head"]):
        record(recorder, step, held_up_by=name)
    stats = recorder.stats()
    assert (stats["held_up_by"], stats["held_up_steps"]) == ("head", 3)


def test_stats_are_flat_and_complete_from_the_start() -> None:
    recorder = Recorder()
    assert set(recorder.stats()) == KEYS
    assert recorder.stats()["steps"] == 0
    assert recorder.stats()["held_up_by"] is None
    record(recorder, 0)
    assert set(recorder.stats()) == KEYS
    assert all(value is None or isinstance(value, int | float | str) for value in recorder.stats().values())
