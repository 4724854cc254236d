"""The pipeline launches rounds in an order that buckets alone decide, sees all to their ends, and never hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.exchange.pipeline import PendingRounds, Pipeline
from gradsync.transport.lane_thread import LaneThread
from gradsync.transport.pending import Pending, Promise

_BOUND_S = 30.0  # far beyond what any of this takes: only a hang reaches it

Round = tuple[int, int]  # which of a bucket's rounds
# For each bucket its rounds: whether rank 1 takes part in it, and whether it lands before the other rank has come.
buckets = st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4), max_size=6)
some = settings(max_examples=100, deadline=None)


class Wire:
    """Joins simulated ranks: a round lands when all who take part in it have launched it, or at once if it is eager."""

    def __init__(self) -> None:
        self.launched: tuple[list[Round], list[Round]] = ([], [])
        self._here: dict[Round, int] = {}
        self._met = threading.Condition()

    def launch(self, rank: int, which: Round, waits_for: int) -> Pending:
        with self._met:
            self.launched[rank].append(which)
            self._here[which] = self._here.get(which, 0) + 1
            self._met.notify_all()
        return GroupMeeting(self, which, waits_for)

    def landed(self, which: Round, waits_for: int, slice_s: float) -> bool:
        with self._met:
            return self._met.wait_for(lambda: self._here[which] >= waits_for, slice_s)


class GroupMeeting(Pending):
    """A round under way."""

    def __init__(self, wire: Wire, which: Round, waits_for: int) -> None:
        super().__init__(f"round {which}")
        self._wire, self._which, self._waits_for = wire, which, waits_for

    def landed(self, slice_s: float) -> bool:
        return self._wire.landed(self._which, self._waits_for, slice_s)

    def settle(self) -> None: ...


class Broken(Pending):
    """A round that failed."""

    def landed(self, slice_s: float) -> bool:
        return True

    def settle(self) -> None:
        raise ConnectionError("the wire broke")


def travel(wire: Wire, rank: int, bucket: int, rounds: list[tuple[bool, bool]]) -> PendingRounds:
    for number, (both, eager) in enumerate(rounds):
        takes_part = rank == 0 or both
        yield wire.launch(rank, (bucket, number), 2 if both and not eager else 1) if takes_part else None


def travel_and_fail(wire: Wire, bucket: int, good_rounds: int, how: str) -> PendingRounds:
    yield from travel(wire, 0, bucket, [(False, True)] * good_rounds)
    if how == "raises":
        raise ArithmeticError("the encoder broke")
    yield Broken("a round")


def delivery(bucket: int) -> Promise:
    return Promise(f"bucket {bucket}", 0, bucket, on_host=True)


@contextmanager
def pipelines(count: int, threads: bool = True) -> Iterator[list[Pipeline]]:
    lane_threads = [LaneThread() if threads else None for _ in range(count)]
    yield [Pipeline(lane_thread, torch.device("cpu")) for lane_thread in lane_threads]
    for lane_thread in lane_threads:
        if lane_thread is not None:
            lane_thread.close(_BOUND_S)


def launched_by_one(rounds: list[int], threads: bool) -> list[Round]:
    """The order in which one rank launches so many rounds of each bucket."""
    wire = Wire()
    with pipelines(1, threads) as [pipeline]:
        deliveries = [delivery(bucket) for bucket in range(len(rounds))]
        for bucket, number in enumerate(rounds):
            pipeline.take(travel(wire, 0, bucket, [(False, True)] * number), deliveries[bucket])
        pipeline.flush()
        assert all(each.landed(_BOUND_S) for each in deliveries)
    return wire.launched[0]


@pytest.mark.parametrize("threads", [True, False], ids=["on a thread", "at once"])
def test_round_two_of_a_bucket_follows_round_one_of_the_next(threads: bool) -> None:
    assert launched_by_one([2, 2, 2], threads) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    assert launched_by_one([1, 3, 1, 2], threads) == [(0, 0), (1, 0), (2, 0), (1, 1), (3, 0), (1, 2), (3, 1)]


@some
@given(buckets=buckets, data=st.data())
def test_ranks_launch_alike_however_fast_each_is(buckets: list[list[tuple[bool, bool]]], data: st.DataObject) -> None:
    wire = Wire()
    deliveries = [[delivery(bucket) for bucket in range(len(buckets))] for _ in range(2)]
    with pipelines(2) as both:
        work: list[list[Callable[[], None]]] = [
            [
                lambda rank=rank, bucket=bucket: both[rank].take(
                    travel(wire, rank, bucket, buckets[bucket]), deliveries[rank][bucket]
                )
                for bucket in range(len(buckets))
            ]
            + [both[rank].flush]
            for rank in range(2)
        ]
        # Who comes when: each rank hands in its buckets in order, the two in any order between them.
        for rank in data.draw(st.permutations([0] * len(work[0]) + [1] * len(work[1]))):
            work[rank].pop(0)()
        assert all(each.landed(_BOUND_S) for rank in deliveries for each in rank)
    assert all(each.succeeded for rank in deliveries for each in rank)
    ours, theirs = wire.launched
    assert sorted(ours) == [(bucket, number) for bucket, rounds in enumerate(buckets) for number in range(len(rounds))]
    assert theirs == [(bucket, number) for bucket, number in ours if buckets[bucket][number][0]]


@some
@given(
    before=st.lists(st.integers(0, 3), max_size=4),
    after=st.lists(st.integers(0, 3), max_size=3),
    good_rounds=st.integers(0, 2),
    how=st.sampled_from(["raises", "lands badly"]),
    threads=st.booleans(),
)
def test_rounds_that_fail_take_all_later_ones_with_it_and_nobody_waits(
    before: list[int], after: list[int], good_rounds: int, how: str, threads: bool
) -> None:
    wire, failing = Wire(), len(before)
    rounds = [*before, -1, *after]
    deliveries = [delivery(bucket) for bucket in range(len(rounds) + 1)]
    with pipelines(1, threads) as [pipeline]:
        for bucket, number in enumerate(rounds):
            good = travel(wire, 0, bucket, [(False, True)] * number)
            its_rounds = travel_and_fail(wire, bucket, good_rounds, how) if bucket == failing else good
            pipeline.take(its_rounds, deliveries[bucket])
        pipeline.flush()
        assert all(each.landed(_BOUND_S) for each in deliveries[:-1])
        launched = len(wire.launched[0])
        pipeline.take(travel(wire, 0, len(rounds), [(False, True)]), deliveries[-1])  # a step later
        pipeline.flush()
        assert deliveries[-1].landed(_BOUND_S)
    assert len(wire.launched[0]) == launched, "nothing more leaves"
    with pytest.raises((ArithmeticError, ConnectionError), match="broke"):
        deliveries[failing].settle()
    for bucket, each in enumerate(deliveries):
        if not each.succeeded and bucket != failing:
            with pytest.raises(RuntimeError, match="broke"):
                each.settle()
    # Those after it may have come to their ends before it failed, except in the step that follows.
    assert not deliveries[-1].succeeded


def test_what_the_waiting_thread_does_comes_after_a_good_end_only() -> None:
    done: list[str] = []
    with pipelines(1, threads=False) as [pipeline]:
        for name, its_rounds in (("good", travel(Wire(), 0, 0, [])), ("bad", travel_and_fail(Wire(), 1, 0, "raises"))):
            each = delivery(0)
            each.then(lambda name=name: done.append(name))
            pipeline.take(its_rounds, each)
            assert each.landed(_BOUND_S)
            if name == "good":
                each.settle()
            else:
                with pytest.raises(ArithmeticError):
                    each.settle()
    assert done == ["good"]


class Unsteady(Pipeline):
    """A pipeline whose stream cannot be entered from the `fails_at`-th time on, as after an error of the device."""

    def __init__(self, lane_thread: LaneThread | None, fails_at: int) -> None:
        super().__init__(lane_thread, torch.device("cpu"))
        self._left = fails_at

    def on_stream(self) -> AbstractContextManager[object]:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the device is gone")
        return super().on_stream()


@pytest.mark.parametrize("threads", [True, False], ids=["on a thread", "at once"])
@pytest.mark.parametrize("fails_at", range(5))
def test_a_stream_that_cannot_be_entered_fails_every_delivery(fails_at: int, threads: bool) -> None:
    wire, lane_thread = Wire(), LaneThread() if threads else None
    pipeline = Unsteady(lane_thread, fails_at)
    deliveries = [delivery(bucket) for bucket in range(4)]
    for bucket, each in enumerate(deliveries):
        pipeline.take(travel(wire, 0, bucket, [(False, True)] * 9), each)
    pipeline.flush()
    for each in deliveries:
        assert each.landed(_BOUND_S)
        with pytest.raises(RuntimeError, match="the device is gone"):
            each.settle()
    if lane_thread is not None:
        lane_thread.close(_BOUND_S)
