"""Any schedule, run over real sends and receives: every bit is the one that the schedule's definition gives."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from gradsync.algorithms.halving_doubling import halving_doubling
from gradsync.algorithms.hierarchical import hierarchical
from gradsync.algorithms.ring import ring
from gradsync.algorithms.schedule import Recipe, Schedule, Transfer, chunk_bounds
from gradsync.algorithms.tree import tree
from gradsync.exchange.schedule_runner import PIECE_NBYTES, Program, stamp
from gradsync.exchange.schedule_runner import run as run_program
from gradsync.transport.groups import Channel, group_of

RECIPES: list[Recipe] = [ring(), tree(1), tree(3), halving_doubling(), hierarchical()]
HOSTS: dict[int, list[Any]] = {
    1: [1],
    2: [2, [[1], [0]]],
    3: [3, [[0, 2], [1]]],
    4: [4, [[0, 1], [2, 3]], [[0], [1, 2, 3]]],
}
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
SIZES = {0: PIECE_NBYTES, 1: PIECE_NBYTES, 2: PIECE_NBYTES, 7: 1, 1023: PIECE_NBYTES, 9001: 3001}  # with piece_nbytes
KINDS = [(dtype, whole) for dtype in FLOATS for whole in (False, True)] + [(dtype, True) for dtype in INTEGERS]


class Case(NamedTuple):
    schedule: Schedule
    numel: int
    piece_nbytes: int
    dtype: torch.dtype
    whole: bool  # whole numbers, which add up exactly in any order


def cases(schedule: Schedule) -> list[Case]:
    """Every size with some kinds of numbers, the largest with every kind."""
    return [
        Case(schedule, numel, piece, *kind)
        for number, (numel, piece) in enumerate(SIZES.items())
        for kind in (KINDS if numel == max(SIZES) else KINDS[number % 4 :: 4])
    ]


def data(case: Case, rank: int) -> torch.Tensor:
    """A rank's values, the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 * case.numel + rank)
    if case.whole:
        return torch.randint(0, 9, (case.numel,), generator=generator).to(case.dtype)
    return torch.randn(case.numel, dtype=torch.float64, generator=generator).to(case.dtype)


def played(case: Case) -> list[torch.Tensor]:
    """Every rank's outcome by the definition of a schedule, as plainly as it reads."""
    bounds = chunk_bounds(case.numel, case.schedule.num_chunks)
    now = [data(case, rank) for rank in range(case.schedule.world_size)]
    for transfers in case.schedule.rounds:
        before = [flat.clone() for flat in now]
        for t in transfers:
            part = slice(*bounds[t.chunk])
            now[t.dst][part] = now[t.dst][part] + before[t.src][part] if t.add else before[t.src][part]
    return now


def bits(flat: torch.Tensor) -> int:
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())


@contextmanager
def channel() -> Iterator[Channel]:
    groups = group_of(dist.group.WORLD)
    groups.add_control()
    groups.add_data(dist.group.WORLD, {"cpu": torch.device("cpu")})
    yield groups.data["cpu"]
    # Nobody lets go before everybody has received.
    dist.barrier()
    groups.close()


def run_cases(tried: list[Case], times: int) -> list[list[int]]:
    """The bits of each case's outcome, run after run."""
    found = []
    with channel() as wire:
        for number, case in enumerate(tried):
            program = Program.compile(
                case.schedule, dist.get_rank(), case.numel, case.dtype.itemsize, case.piece_nbytes
            )
            flats = [data(case, dist.get_rank()) for _ in range(times)]
            for time, flat in enumerate(flats):
                run_program(program, flat, wire, stamp(time, number))
            found.append([bits(flat) for flat in flats])
    return found


# The contract of every algorithm


def tolerance(dtype: torch.dtype, ranks: int) -> float:
    """A few roundings of values below about 4 per rank."""
    return 4 * ranks * ranks * torch.finfo(dtype).eps


@pytest.mark.parametrize("ranks", HOSTS)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_every_rank_gets_the_bits_of_the_definition_in_every_run(recipe: Recipe, ranks: int, run: Any) -> None:
    schedules = dict.fromkeys(recipe.schedule(hosts) for hosts in HOSTS[ranks])  # some do not depend on the hosts
    tried = [case for schedule in schedules for case in cases(schedule)]
    found = run(run_cases, tried, 2, ranks=ranks)
    for number, case in enumerate(tried):
        expected = played(case)
        assert [each[number] for each in found] == [[bits(flat)] * 2 for flat in expected], case
        assert len({bits(flat) for flat in expected}) == 1, case
        if case.whole:
            total = torch.stack([data(case, rank) for rank in range(ranks)]).sum(0, dtype=case.dtype)
            assert torch.equal(expected[0], total), case
        else:
            total = torch.stack([data(case, rank).double() for rank in range(ranks)]).sum(0)
            allowed = tolerance(case.dtype, ranks)
            torch.testing.assert_close(expected[0].double(), total, rtol=0, atol=allowed)


# Schedules that are no all-reduce


def add(src: int, dst: int, chunk: int) -> Transfer:
    return Transfer(src, dst, chunk, add=True)


def copy(src: int, dst: int, chunk: int) -> Transfer:
    return Transfer(src, dst, chunk, add=False)


PARTS: dict[str, Schedule] = {
    "only across hosts": Schedule(4, 4, hierarchical().schedule([[0, 1], [2, 3]]).rounds[1:3]),
    "a rank without work": Schedule(3, 2, ((add(0, 1, 0), add(0, 1, 1)),)),
    "no rounds": Schedule(2, 2, ()),
    "each adds what it sends": Schedule(2, 1, ((add(0, 1, 0), add(1, 0, 0)),)),
    "each gives away what it sends": Schedule(2, 1, ((copy(0, 1, 0), copy(1, 0, 0)),)),
    "passed on in one round": Schedule(4, 2, ((add(0, 1, 0), copy(1, 2, 0), add(2, 3, 0), copy(3, 0, 0)),) * 2),
    "a copy, then an addition": Schedule(3, 1, ((copy(1, 0, 0), add(2, 0, 0)),)),
    "an addition, then a copy": Schedule(3, 1, ((add(1, 0, 0), copy(2, 0, 0)),)),
    "three additions": Schedule(4, 1, ((add(3, 0, 0), add(1, 0, 0), add(2, 0, 0)),)),
    "orders that cross": Schedule(3, 2, ((add(1, 0, 0), add(2, 0, 0), add(2, 0, 1), add(1, 0, 1)),)),
    "twice the same": Schedule(2, 2, ((add(1, 0, 1), add(1, 0, 1), copy(0, 1, 0), copy(0, 1, 0)),)),
    "backwards": Schedule(2, 3, ((add(1, 0, 2), add(1, 0, 1), add(1, 0, 0)),)),
}


def any_schedule(seed: int, ranks: int) -> Schedule:
    dice = random.Random(seed)
    num_chunks = dice.randint(1, 5)
    pairs = [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]
    rounds = [
        tuple(
            Transfer(*dice.choice(pairs), dice.randrange(num_chunks), dice.random() < 0.6)
            for _ in range(dice.randint(0, 12))
        )
        for _ in range(4)
    ]
    return Schedule(ranks, num_chunks, tuple(rounds))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_an_all_reduce_and_any_other_schedule_do_what_they_say(ranks: int, run: Any) -> None:
    named = [schedule for schedule in PARTS.values() if schedule.world_size == ranks]
    schedules = named + [any_schedule(seed, ranks) for seed in range(30)]
    tried = [Case(s, numel, piece, torch.float32, False) for s in schedules for numel, piece in ((3, 1), (5000, 999))]
    found = run(run_cases, tried, 1, ranks=ranks)
    for number, case in enumerate(tried):
        assert [each[number] for each in found] == [[bits(flat)] for flat in played(case)], case


class Batching:
    """A channel like that of nccl: what is issued in a batch is waited for as a whole."""

    on_host = False

    def __init__(self, wire: Channel) -> None:
        self._wire = wire
        self._issued: list[Any] = []

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._issued.append(self._wire.send(tensor, dst, 0))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self._issued.append(self._wire.recv(tensor, src, 0))

    def batch(self, device: torch.device, issue: Any) -> None:
        issue()
        while self._issued:
            self._issued.pop(0).wait()


def run_in_batches(tried: list[Case]) -> list[int]:
    flats = [data(case, dist.get_rank()) for case in tried]
    with channel() as wire:
        for case, flat in zip(tried, flats, strict=True):
            program = Program.compile(case.schedule, dist.get_rank(), case.numel, 4, case.piece_nbytes)
            run_program(program, flat, Batching(wire), 0)  # type: ignore[arg-type]
    return [bits(flat) for flat in flats]


def test_a_round_in_one_batch_gives_the_same_bits(run: Any) -> None:
    schedules = [any_schedule(seed, 3) for seed in range(10)] + [recipe.schedule(3) for recipe in RECIPES]
    tried = [Case(schedule, 2000, 999, torch.float32, False) for schedule in schedules]
    found = run(run_in_batches, tried, ranks=3)
    for number, case in enumerate(tried):
        assert [each[number] for each in found] == [bits(flat) for flat in played(case)], case


# Messages find their receivers


def receive_with_one_tag(posted_first: bool) -> list[int]:
    """What rank 1 gets, receive by receive, posted before or after rank 0 sends."""
    with channel() as wire:
        numbers = torch.arange(40) if dist.get_rank() == 0 else torch.full((40,), -1)
        if dist.get_rank() == 1 and not posted_first:
            dist.barrier()
        begin = wire.send if dist.get_rank() == 0 else wire.recv
        if dist.get_rank() == 0 and posted_first:
            dist.barrier()
        works = [begin(number, 1 - dist.get_rank(), 5) for number in numbers.split(1)]
        if dist.get_rank() == (1 if posted_first else 0):
            dist.barrier()
        for work in works:
            work.wait()
    return numbers.tolist()


@pytest.mark.parametrize("posted_first", [True, False])
def test_messages_of_one_pair_and_tag_keep_their_order(posted_first: bool, run: Any) -> None:
    assert run(receive_with_one_tag, posted_first) == [list(range(40))] * 2


def run_at_once(case: Case, stamps: list[int]) -> list[int]:
    """Several runs on one channel, each on a thread; every rank starts them in another order."""
    rank = dist.get_rank()
    with channel() as wire:
        program = Program.compile(case.schedule, rank, case.numel, case.dtype.itemsize, case.piece_nbytes)
        flats = [data(case, rank) * (1 + number) for number in range(len(stamps))]
        threads = [
            threading.Thread(target=run_program, args=(program, flat, wire, mark))
            for flat, mark in zip(flats, stamps, strict=True)
        ]
        for thread in threads[rank:] + threads[:rank]:
            thread.start()
        for thread in threads:
            thread.join()
    return [bits(flat) for flat in flats]


@pytest.mark.parametrize("stamps", [[stamp(0, 0), stamp(0, 1), stamp(1, 0)], [stamp(1023, 2047), stamp(0, 0), 1 << 21]])
def test_runs_with_different_stamps_do_not_mix(stamps: list[int], run: Any) -> None:
    case = Case(ring().schedule(3), 3000, 256, torch.float64, whole=True)
    total = torch.stack([data(case, rank) for rank in range(3)]).sum(0)
    assert run(run_at_once, case, stamps, ranks=3) == [[bits(total * (1 + number)) for number in range(3)]] * 3


# What a caller does wrong


def run_wrongly() -> list[str]:
    said = []
    program = Program.compile(ring().schedule(2), dist.get_rank(), 6, 4)
    with channel() as wire:
        for flat in (torch.ones(5), torch.ones(6).double(), torch.ones(2, 3), torch.ones(12)[::2]):
            try:
                run_program(program, flat, wire, 0)
            except ValueError as error:
                said.append(str(error))
        try:
            run_program(program, torch.ones(6, device="meta"), wire, 0)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_tensor_that_does_not_fit_is_refused_before_anything_is_sent(run: Any) -> None:
    expected = [
        "the program was compiled for 6 elements of 4 bytes, got 5 of 4",
        "the program was compiled for 6 elements of 4 bytes, got 6 of 8",
        "run takes a contiguous tensor of one dimension, got shape (2, 3)",
        "run takes a contiguous tensor of one dimension, got shape (6,)",
        "gloo sends and receives tensors in host memory, got one on meta; copy it there",
    ]
    assert run(run_wrongly) == [expected] * 2
