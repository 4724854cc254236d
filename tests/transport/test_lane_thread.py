"""The lane thread: tasks run in order, after a failure none runs any more, and close waits for the last."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gradsync.transport.lane_thread import LaneThread
from gradsync.transport.pending import LaneTask

BOUND_S = 30.0


@pytest.fixture
def lane_thread() -> Iterator[LaneThread]:
    lane_thread = LaneThread()
    yield lane_thread
    lane_thread.close(BOUND_S)


def task(run: object) -> LaneTask:
    return LaneTask(run, "bucket 0", 0, 0)  # type: ignore[arg-type]


def test_errands_run_one_after_the_other_in_their_order(lane_thread: LaneThread) -> None:
    seen: list[tuple[int, str]] = []
    tasks = [task(lambda i=i: seen.append((i, threading.current_thread().name))) for i in range(200)]
    for each in tasks:
        lane_thread.take(each)
    assert tasks[-1].landed(BOUND_S)
    assert seen == [(i, "gradsync-lane") for i in range(200)]
    for each in tasks:
        each.settle()
        assert each.succeeded
        assert each.finished_at >= each.launched_at


def test_an_error_is_raised_by_its_errand_and_all_that_follow_fail_with_it(lane_thread: LaneThread) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("the wire broke")

    first, broken, late = task(lambda: ran.append("first")), task(fail), task(lambda: ran.append("late"))
    for each in (first, broken, late):
        lane_thread.take(each)
    assert late.landed(BOUND_S)
    first.settle()
    for each in (broken, late):
        assert not each.succeeded
        with pytest.raises(RuntimeError, match="the wire broke"):
            each.settle()
    afterwards = task(lambda: ran.append("afterwards"))
    lane_thread.take(afterwards)
    assert afterwards.landed(BOUND_S)
    assert ran == ["first"]
    assert not afterwards.succeeded


def test_an_error_of_any_kind_is_kept_for_who_waits(lane_thread: LaneThread) -> None:
    def fail() -> None:
        raise KeyError("missing")

    broken, late = task(fail), task(lambda: None)
    lane_thread.take(broken)
    lane_thread.take(late)
    assert late.landed(BOUND_S)
    with pytest.raises(KeyError):
        broken.settle()
    with pytest.raises(RuntimeError, match="missing"):  # as the transport's errors are raised
        late.settle()


def test_what_an_errand_held_is_free_when_it_has_run(lane_thread: LaneThread) -> None:
    freed = threading.Event()

    class Held:
        def __del__(self) -> None:
            freed.set()

    held = Held()
    done = task(lambda held=held: None)
    del held
    lane_thread.take(done)
    assert done.landed(BOUND_S)
    assert freed.wait(BOUND_S)


def test_close_waits_for_what_was_handed_over() -> None:
    lane_thread, go = LaneThread(), threading.Event()
    ran: list[int] = []
    lane_thread.take(task(lambda: go.wait(BOUND_S)))
    last = task(lambda: ran.append(1))
    lane_thread.take(last)
    go.set()
    lane_thread.close(BOUND_S)
    assert ran == [1]
    assert last.landed(0)
    assert "gradsync-lane" not in {thread.name for thread in threading.enumerate()}


def test_closing_twice_or_unused_does_nothing() -> None:
    lane_thread = LaneThread()
    lane_thread.close(BOUND_S)
    lane_thread.take(task(lambda: None))
    lane_thread.close(BOUND_S)
    lane_thread.close(BOUND_S)


def test_close_leaves_a_thread_that_is_stuck() -> None:
    lane_thread, go = LaneThread(), threading.Event()
    stuck = task(lambda: go.wait(BOUND_S))
    lane_thread.take(stuck)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "gradsync-lane"]
    lane_thread.close(0.01)
    assert thread.is_alive()
    go.set()
    thread.join(BOUND_S)
    assert stuck.succeeded


def test_what_comes_after_landing_runs_in_the_thread_that_waits(lane_thread: LaneThread) -> None:
    where: list[str] = []
    done = task(lambda: None)
    done.then(lambda: where.append(threading.current_thread().name))
    lane_thread.take(done)
    assert done.landed(BOUND_S)
    assert where == []
    done.settle()
    assert where == [threading.current_thread().name]
