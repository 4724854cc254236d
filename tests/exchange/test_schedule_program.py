"""A program, without a wire: all ranks agree on every message, and nothing is changed before it was sent."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradsync.algorithms.halving_doubling import halving_doubling
from gradsync.algorithms.hierarchical import hierarchical
from gradsync.algorithms.ring import ring
from gradsync.algorithms.schedule import Schedule, Transfer, chunk_bounds
from gradsync.algorithms.tree import tree
from gradsync.exchange.schedule_runner import Message, Program, RoundPart, stamp

RECIPES = [ring(), tree(1), tree(3), tree(8), halving_doubling(), hierarchical()]
ITEMSIZE = 4
many = settings(max_examples=100, deadline=None)


@st.composite
def all_reduces(draw: st.DrawFn) -> Schedule:
    """Of any recipe, on hosts of any sizes, their ranks in any order."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    ranks = list(draw(st.permutations(range(sum(sizes)))))
    return draw(st.sampled_from(RECIPES)).schedule([[ranks.pop() for _ in range(size)] for size in sizes])


@st.composite
def anything(draw: st.DrawFn) -> Schedule:
    """Any transfers at all, all-reduce or not."""
    n, num_chunks = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    rank, chunk = st.integers(0, n - 1), st.integers(0, num_chunks - 1)
    transfers = st.builds(Transfer, rank, rank, chunk, st.booleans()).filter(lambda t: t.src != t.dst)
    return Schedule(
        n, num_chunks, tuple(draw(st.lists(st.lists(transfers, min_size=2, max_size=9).map(tuple), max_size=2)))
    )


schedules = st.one_of(all_reduces(), anything())
numels = st.one_of(st.integers(0, 12), st.integers(13, 400))
pieces = st.sampled_from([1, 4, 7, 50, 1 << 20])  # bytes


def programs(schedule: Schedule, numel: int, piece_nbytes: int) -> list[Program]:
    return [Program.compile(schedule, rank, numel, ITEMSIZE, piece_nbytes) for rank in range(schedule.world_size)]


def steps(program: Program) -> dict[int, RoundPart]:
    return {step.number: step for step in program.steps}


def sent(program: Program, number: int, dst: int) -> list[Message]:
    step = steps(program).get(number, RoundPart(number, (), (), ()))
    return [message for message in step.sends if message.dst == dst]


def received(program: Program, number: int, src: int) -> list[Message]:
    step = steps(program).get(number, RoundPart(number, (), (), ()))
    return [arrival.message for arrival in step.arrivals if arrival.message.src == src]


@many
@given(schedule=schedules, numel=numels, piece_nbytes=pieces)
def test_a_pair_agrees_on_the_messages_of_every_round(schedule: Schedule, numel: int, piece_nbytes: int) -> None:
    parts = programs(schedule, numel, piece_nbytes)
    for number in range(len(schedule.rounds)):
        for src, sender in enumerate(parts):
            for dst, receiver in enumerate(parts):
                messages = sent(sender, number, dst)
                assert messages == received(receiver, number, src)
                assert all((m.src, m.dst) == (src, dst) and m.start < m.stop for m in messages)


# By hand, with every send as late as a real one may be


def played(schedule: Schedule, numel: int) -> list[list[Any]]:
    """Every rank's elements by the definition: a hash of its history, so that no two orders look the same."""
    bounds = chunk_bounds(numel, schedule.num_chunks)
    now = [[f"r{rank}"] * numel for rank in range(schedule.world_size)]
    for transfers in schedule.rounds:
        before = [list(elements) for elements in now]
        for t in transfers:
            for i in range(*bounds[t.chunk]):
                now[t.dst][i] = put(now[t.dst][i], before[t.src][i], t.add)
    return now


def put(own: str, incoming: str, add: bool) -> str:
    return str(hash((own, incoming))) if add else incoming


def take_part(step: RoundPart, elements: list[str], before: list[list[str]], scratch_numel: int) -> None:
    """One rank's round: what lands in place does so first, and a send reads only when it must be done."""
    mine = list(elements)

    def send(messages: tuple[Message, ...]) -> None:
        for m in messages:
            assert elements[m.start : m.stop] == mine[m.start : m.stop], f"changed before it was sent: {m}"

    scratch = [""] * scratch_numel
    for message, at, _ in step.arrivals:
        into, start = (elements, message.start) if at is None else (scratch, at)
        length = message.stop - message.start
        assert start + length <= len(into)
        into[start : start + length] = before[message.src][message.start : message.stop]
    num_sent = 0
    for message, at, after in step.arrivals:
        send(step.sends[num_sent:after])
        num_sent = max(num_sent, after)
        if at is not None:
            for i in range(message.start, message.stop):
                elements[i] = put(elements[i], scratch[at + i - message.start], message.add)
    send(step.sends[num_sent:])


def of_rank_0(*listed: tuple[int, int, bool]) -> Schedule:
    """One round of what rank 0 receives."""
    return Schedule(3, 2, (tuple(Transfer(src, 0, chunk, add) for src, chunk, add in listed),))


# Shapes that are rarely found by chance: orders that cross, and a copy after an addition.
@example(schedule=of_rank_0((1, 0, True), (2, 0, True), (2, 1, True), (1, 1, True)), numel=6, piece_nbytes=4)
@example(schedule=of_rank_0((1, 0, True), (2, 0, False), (1, 1, False), (2, 1, True)), numel=6, piece_nbytes=4)
@many
@given(schedule=schedules, numel=numels, piece_nbytes=pieces)
def test_a_program_does_what_its_schedule_says(schedule: Schedule, numel: int, piece_nbytes: int) -> None:
    parts = programs(schedule, numel, piece_nbytes)
    now = [[f"r{rank}"] * numel for rank in range(schedule.world_size)]
    for number in range(len(schedule.rounds)):
        before = [list(elements) for elements in now]
        for rank, part in enumerate(parts):
            if number in steps(part):
                take_part(steps(part)[number], now[rank], before, part.scratch_numel)
    assert now == played(schedule, numel)


# How much is sent, and where it lands


@many
@given(schedule=all_reduces(), numel=numels, piece_nbytes=pieces)
def test_in_an_all_reduce_additions_land_in_scratch_and_nothing_waits_for_a_send(
    schedule: Schedule, numel: int, piece_nbytes: int
) -> None:
    for program in programs(schedule, numel, piece_nbytes):
        for step in program.steps:
            for message, scratch, after in step.arrivals:
                assert after == 0
                assert scratch is not None or not message.add


def test_in_a_ring_of_three_copies_land_in_place() -> None:
    for program in programs(ring().schedule(3), 300, 100):
        copies = [arrival for step in program.steps[3:] for arrival in step.arrivals]
        assert [arrival.scratch for arrival in copies] == [None] * len(copies)


def test_consecutive_chunks_are_one_message_and_strided_ones_are_not() -> None:
    both = ((Transfer(0, 1, 0, True), Transfer(0, 1, 1, True), Transfer(0, 1, 3, True)),)
    (step,) = Program.compile(Schedule(2, 4, both), 0, 40, ITEMSIZE).steps
    assert [(m.start, m.stop) for m in step.sends] == [(0, 20), (30, 40)]


def test_a_copy_and_an_addition_are_never_one_message() -> None:
    both = ((Transfer(0, 1, 0, True), Transfer(0, 1, 1, False)),)
    (step,) = Program.compile(Schedule(2, 2, both), 1, 40, ITEMSIZE).steps
    assert [a.scratch for a in step.arrivals] == [0, None]


@many
@given(numel=st.integers(1, 500), itemsize=st.sampled_from([1, 2, 4, 8]), piece_nbytes=st.integers(1, 300))
def test_pieces_are_as_many_as_can_have_their_size(numel: int, itemsize: int, piece_nbytes: int) -> None:
    one = Schedule(2, 1, ((Transfer(0, 1, 0, True),),))
    (step,) = Program.compile(one, 0, numel, itemsize, piece_nbytes).steps
    sizes = [(m.stop - m.start) * itemsize for m in step.sends]
    assert sum(sizes) == numel * itemsize
    if len(sizes) > 1:
        assert min(sizes) >= piece_nbytes
    assert max(sizes) < 2 * max(piece_nbytes, itemsize) + itemsize


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_scratch_is_what_the_largest_round_adds(n: int) -> None:
    assert Program.compile(ring().schedule(n), 0, 24 * n, ITEMSIZE).scratch_numel == 24
    power_of_two = 1 << (n.bit_length() - 1)
    folded = 24 * n if n != power_of_two else 12 * n
    assert Program.compile(halving_doubling().schedule(n), 0, 24 * n, ITEMSIZE).scratch_numel == folded


def test_equal_arguments_make_equal_programs() -> None:
    one, other = (Program.compile(tree(3).schedule(5), 2, 100, 8, 16) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


def test_rounds_without_work_and_single_ranks_have_no_steps() -> None:
    for recipe in RECIPES:
        assert Program.compile(recipe.schedule(1), 0, 100, ITEMSIZE).steps == ()
        assert Program.compile(recipe.schedule(4), 0, 0, ITEMSIZE).steps == ()


# Tags


@given(sync=st.integers(0, 1 << 40), bucket=st.integers(0, 1 << 20))
def test_a_stamp_leaves_room_for_the_round_in_31_bits(sync: int, bucket: int) -> None:
    assert 0 <= stamp(sync, bucket) <= 2**31 - 1024
    assert stamp(sync, bucket) % 1024 == 0
    assert stamp(sync, bucket) == stamp(sync % 1024, bucket % 2048)
    assert stamp(sync, bucket) not in {stamp(sync + 1, bucket), stamp(sync, bucket + 1), stamp(sync + 1, bucket + 1)}


# What a caller does wrong


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rank": 2}, "rank must be one of the schedule's 2 ranks, got 2"),
        ({"rank": -1}, "rank must be one of the schedule's 2 ranks, got -1"),
        ({"itemsize": 0}, "itemsize and piece_nbytes must be at least 1 byte, got 0 and 8"),
        ({"piece_nbytes": 0}, "itemsize and piece_nbytes must be at least 1 byte, got 4 and 0"),
        ({"numel": -1}, "chunk_bounds needs numel >= 0 and num_chunks >= 1, got -1 and 2"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Program.compile(ring().schedule(2), **{"rank": 0, "numel": 10, "itemsize": 4, "piece_nbytes": 8, **changes})


@many
@given(schedule=schedules, numel=numels, piece_nbytes=pieces)
def test_what_is_received_early_lands_where_the_step_before_neither_reads_nor_writes(
    schedule: Schedule, numel: int, piece_nbytes: int
) -> None:
    for program in programs(schedule, numel, piece_nbytes):
        for before, step in pairwise(program.steps):
            used = [*before.sends, *(arrival.message for arrival in before.arrivals)]
            in_place = [arrival.message for arrival in step.arrivals if arrival.scratch is None]
            assert not any(message.meets(other) for message in in_place for other in used)


@many
@given(schedule=schedules, numel=numels, piece_nbytes=pieces)
def test_what_is_sent_ahead_is_touched_by_no_arrival_that_is_still_to_come(
    schedule: Schedule, numel: int, piece_nbytes: int
) -> None:
    for program in programs(schedule, numel, piece_nbytes):
        assert not any(any(step.ready) for step in program.steps[:1])
        for before, step in pairwise(program.steps):
            assert list(step.ready) == sorted(step.ready)
            for send, ready in zip(step.sends, step.ready, strict=True):
                assert not any(arrival.message.meets(send) for arrival in before.arrivals[ready:])


def test_a_ring_sends_its_second_round_piece_by_piece_while_the_first_arrives() -> None:
    for program in programs(ring().schedule(3), 300, 100):  # chunks of 100 elements, pieces of 25
        assert program.steps[1].ready == (1, 2, 3, 4)
