"""The team: every path through shared memory gives the bits of the reference, in any order and from any thread."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from gradsync.kernels.library import CODES, Op, OpKind
from gradsync.kernels.reference import sum_rows
from gradsync.plan.guard import Guard
from gradsync.transport.lane import open_lane
from gradsync.transport.shared_memory import LANE, WORKER, Job, LabelsDiffer, Team, TeamError

# Bytes: what fits on a board, the least piece of STAGED, a block of DIRECT, the largest piece of STAGED.
ROW, PIECE, BLOCK, WINDOW = 16 << 10, 64 << 10, 128 << 10, 256 << 10
BOUND_S = 60.0
LARGEST = 3 << 19

Place = tuple[torch.Tensor, Any]  # this rank's elements, and where everybody's lie


@contextmanager
def a_team(board_nbytes: int = 64) -> Iterator[Team]:
    lane = open_lane(dist.group.WORLD, Guard(), BOUND_S)  # type: ignore[arg-type]
    if dist.get_world_size() == 1:  # a lane makes none of one rank; a host with one rank has one
        team = Team(lane.exchange, [0], 0, {}, board_nbytes)
    else:
        lane.open_team(board_nbytes)
        assert lane.team is not None
        team = lane.team
    yield team
    dist.barrier()
    if lane.team is None:
        team.close()
    lane.close(together=True)


def data(rank: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A rank's values, the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * count + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-(1 << 31), (1 << 31) - 1, (count,), generator=generator, dtype=torch.int64).to(dtype)


def truth(count: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return sum_rows([data(rank, count, dtype, seed) for rank in range(dist.get_world_size())], scale)


def place(team: Team, memory: torch.Tensor, count: int, dtype: torch.dtype, offset: int = 0) -> Place:
    """`count` elements of the team's memory, `offset` bytes into it."""
    found = team.locate(memory)
    assert found is not None
    return memory[offset:][: count * dtype.itemsize].view(dtype), found[0].bases(offset)


def op_of(
    kind: OpKind, flat: torch.Tensor, bases: Any = None, bounds: Any = None, scale: float = 1.0, label: str = "the same"
) -> Op:
    op = Op(label.encode(), flat.data_ptr(), None, None, flat.numel(), scale, kind, CODES[flat.dtype])
    if bases is not None:
        op.bases = ctypes.addressof(bases)
    if bounds is not None:
        op.bounds = ctypes.addressof(bounds)
    return op


def advance(team: Team, op: Op, stream: int = WORKER) -> None:
    deadline = time.monotonic() + BOUND_S
    while not team.advance(stream, op, 0.01):
        assert time.monotonic() < deadline, "the operation does not end"


def wait(job: Job) -> None:
    deadline = time.monotonic() + BOUND_S
    while not job.wait(0.01):
        assert time.monotonic() < deadline, "the job does not end"


def by_worker(team: Team, op: Op) -> None:
    wait(team.submit(op))


# Sums


def sizes(itemsize: int) -> list[int]:
    """Elements around every border."""
    borders = [ROW, PIECE, BLOCK, WINDOW]
    near = {border // itemsize + shift for border in borders for shift in (-1, 0, 1)}
    far = {nbytes // itemsize + 1 for nbytes in (dist.get_world_size() * BLOCK, 4 * WINDOW, 5 * WINDOW)}
    return sorted({0, 1, 17, 1000} | near | far)


def sum_every_way(dtype: torch.dtype, every: int) -> None:
    with a_team() as team:
        memory = team.allocate(LARGEST + 64)
        for i, count in enumerate(sizes(dtype.itemsize)[::every]):
            scale = 1 / 3 if i % 2 else 1.0
            mine, expected = data(team.rank, count, dtype), truth(count, dtype, scale=scale)
            for make in (advance, by_worker)[i % 3 % 2 :]:
                kinds = [OpKind.STAGED, OpKind.DIRECT] + ([OpKind.SMALL] if count * dtype.itemsize <= ROW else [])
                for kind in kinds:
                    # Not at a line's begin: what lies around it must stay.
                    flat, bases = (
                        place(team, memory, count, dtype, 24) if kind == OpKind.DIRECT else (mine.clone(), None)
                    )
                    memory.fill_(0x55)
                    flat.copy_(mine)
                    dist.barrier()
                    make(team, op_of(kind, flat, bases, scale=scale))
                    assert torch.equal(flat, expected), (kind, count, make.__name__)
                    if kind == OpKind.DIRECT:
                        assert bool((memory[:24] == 0x55).all())
                        assert bool((memory[24 + count * dtype.itemsize :] == 0x55).all())
                    dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_path_gives_the_reference_bits_around_every_border(ranks: int, run: Callable[..., Any]) -> None:
    run(sum_every_way, torch.float32, 1, ranks=ranks)


def stage_many_pieces() -> None:
    with a_team() as team:
        for number, nbytes in enumerate((9 << 20, (9 << 20) + 4, (5 << 20) - 4, 9 << 20)):
            count = nbytes // 4
            mine = data(dist.get_rank(), count)
            by_worker(team, team.sum_op(mine, b"staged %d" % number))
            assert torch.equal(mine, truth(count))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_more_pieces_than_a_window_has_slots_take_turns_in_them(ranks: int, run: Callable[..., Any]) -> None:
    run(stage_many_pieces, ranks=ranks)


def sum_other_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64):
        sum_every_way(dtype, 4)


@pytest.mark.parametrize("ranks", [3, 4])
def test_and_for_other_dtypes(ranks: int, run: Callable[..., Any]) -> None:
    run(sum_other_dtypes, ranks=ranks)


def random_bounds(count: int, rng: random.Random) -> Any:
    n = dist.get_world_size()
    inner = sorted(rng.randint(0, count) for _ in range(n - 1))
    return (ctypes.c_uint64 * (n + 1))(0, *inner, count)


def scatter_and_gather() -> None:
    rng = random.Random(1)
    with a_team() as team:
        memory = team.allocate(LARGEST)
        for seed, count in enumerate(sizes(4)):
            bounds = random_bounds(count, rng)
            flat, bases = place(team, memory, count, torch.float32)
            mine = data(team.rank, count, seed=seed)
            flat.copy_(mine)
            expected = mine.clone()
            begin, end = bounds[team.rank], bounds[team.rank + 1]
            expected[begin:end] = truth(count, seed=seed)[begin:end]
            advance(team, op_of(OpKind.SCATTER, flat, bases, bounds), LANE)
            assert torch.equal(flat, expected), count
            flat[begin:end] += 1  # what comes from other hosts
            advance(team, op_of(OpKind.GATHER, flat, bases, bounds), LANE)
            assert torch.equal(flat, truth(count, seed=seed) + 1), count
            flat.fill_(-1)  # the others have fetched what they need: it may be written again at once


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_scatter_adds_ones_own_range_and_gather_fetches_the_others(ranks: int, run: Callable[..., Any]) -> None:
    run(scatter_and_gather, ranks=ranks)


def pointers(parts: Sequence[torch.Tensor]) -> Any:
    return (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))


def shed_and_share(dtype: torch.dtype, every: int) -> None:
    with a_team() as team:
        for seed, count in enumerate([*sizes(dtype.itemsize)[::every], (9 << 20) // dtype.itemsize // team.size]):
            make = (advance, by_worker)[seed % 2]
            # What rank r has for rank t has the seed t: the sum that t gets is of that seed.
            parts = [data(team.rank, count, dtype, seed=to) for to in range(team.size)]
            mine, kept = torch.zeros(count, dtype=dtype), pointers(parts)
            make(team, team.shed_op(mine, kept, b"shed", 0.5))
            assert torch.equal(mine, truth(count, dtype, team.rank, 0.5)), count
            rows = torch.zeros(team.size, count, dtype=dtype)
            own, kept = data(team.rank, count, dtype), pointers(list(rows))
            make(team, team.share_op(own, kept, b"share"))
            for rank, row in enumerate(rows):
                assert torch.equal(row, data(rank, count, dtype)), (count, rank)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_go_through_the_windows_to_those_they_are_for(ranks: int, run: Callable[..., Any]) -> None:
    run(shed_and_share, torch.float32, 1, ranks=ranks)


def test_and_parts_of_other_dtypes(run: Callable[..., Any]) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.int8):
        run(shed_and_share, dtype, 3, ranks=3)


def where_they_lie() -> None:
    """As FSDP does it: what is gathered lies in its place already, and so does what is scattered."""
    with a_team() as team:
        for count in (5, 100_000):
            rows = torch.zeros(team.size, count)
            rows[team.rank] = data(team.rank, count)
            kept = pointers(list(rows))
            advance(team, team.share_op(rows[team.rank], kept, b"share"))
            assert torch.equal(rows, torch.stack([data(rank, count) for rank in range(team.size)]))
            advance(team, team.shed_op(rows[team.rank], kept, b"shed"))
            assert torch.equal(rows[team.rank], team.size * data(team.rank, count))


def test_parts_may_lie_in_what_they_are_parts_of(run: Callable[..., Any]) -> None:
    run(where_they_lie, ranks=2)


def mix(seed: int) -> None:
    """Some 200 operations in an order that all ranks draw alike; sums on the lane's stream while the worker is busy."""
    rng, own = random.Random(seed), random.Random(seed * 10 + dist.get_rank())
    with a_team() as team:
        segments = [team.allocate(480_000) for _ in range(5)]
        done = 0
        while done < 200:
            jobs: list[tuple[Job, Drawn]] = []
            threaded = rng.random() < 0.5
            for index in range(rng.randint(1, 4)):
                done += 1
                drawn = _random_op(team, segments[index], rng, done)
                if threaded:
                    jobs.append((team.submit(drawn.op), drawn))
                else:
                    advance(team, drawn.op)
                    assert torch.equal(drawn.flat, drawn.expected), (done, drawn.op.kind)
            if rng.random() < 0.5:
                done += 1
                drawn = _random_op(team, segments[4], rng, done)
                advance(team, drawn.op, LANE)
                assert torch.equal(drawn.flat, drawn.expected), (done, drawn.op.kind)
            own.shuffle(jobs)  # who waits for which first is everybody's own business
            for job, drawn in jobs:
                wait(job)
                assert torch.equal(drawn.flat, drawn.expected), drawn.op.kind


class Drawn(NamedTuple):
    """An operation, where its result will be, what that must be, and what must stay alive."""

    op: Op
    flat: torch.Tensor
    expected: torch.Tensor
    keeps: object = None


def _size(rng: random.Random) -> int:
    return rng.choice([0, 1, rng.randint(2, 4096), rng.randint(4096, 20000), rng.randint(20000, 120000)])


def _random_op(team: Team, memory: torch.Tensor, rng: random.Random, number: int) -> Drawn:
    count = _size(rng)
    kind = rng.choice([OpKind.STAGED, OpKind.DIRECT, OpKind.SHED, OpKind.SHARE] + [OpKind.SMALL] * (4 * count <= ROW))
    mine, expected = data(team.rank, count, seed=number), truth(count, seed=number)
    if kind == OpKind.SHED:
        out, parts = torch.zeros(count), pointers([mine] * team.size)
        return Drawn(team.shed_op(out, parts, b"shed"), out, expected, (mine, parts))
    if kind == OpKind.SHARE:
        rows = torch.zeros(team.size, count)
        parts, everybody = pointers(list(rows)), [data(rank, count, seed=number) for rank in range(team.size)]
        return Drawn(team.share_op(mine, parts, b"share"), rows, torch.stack(everybody), (mine, parts))
    if kind != OpKind.DIRECT:
        return Drawn(op_of(kind, mine), mine, expected)
    flat, bases = place(team, memory, count, torch.float32)
    flat.copy_(mine)
    return Drawn(op_of(kind, flat, bases), flat, expected)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_hundred_operations_of_mixed_kinds_stay_right(ranks: int, run: Callable[..., Any]) -> None:
    run(mix, ranks, ranks=ranks)


def small_on_every_stream() -> None:
    with a_team() as team:
        for number in range(300):
            mine, expected = data(team.rank, 4096, seed=number), truth(4096, seed=number)
            advance(team, op_of(OpKind.SMALL, mine), (WORKER, LANE)[number % 3 > 0])
            assert torch.equal(mine, expected), number


def test_small_sums_have_room_on_the_boards_of_both_streams(run: Callable[..., Any]) -> None:
    """The lane's boards once had room for labels only: the next operation's label overwrote data still being read."""
    run(small_on_every_stream, ranks=3)


# LabelsDiffer


def come_to_different_sums(by: str) -> list[str]:
    make = advance if by == "advance" else by_worker
    with a_team() as team:
        flat = torch.ones(10)
        said = []
        for turn in range(3):
            try:
                make(team, op_of(OpKind.SMALL, flat, label=f"sum {turn} of rank {team.rank}"))
            except LabelsDiffer as error:
                said += error.labels
            assert flat.tolist() == [1.0] * 10  # nothing was touched
            after = data(team.rank, 5000, seed=turn)
            make(team, op_of(OpKind.STAGED, after))
            assert torch.equal(after, truth(5000, seed=turn))
        return said


@pytest.mark.parametrize("by", ["advance", "worker"])
def test_different_labels_are_seen_by_every_rank_and_the_next_operation_works(by: str, run: Callable[..., Any]) -> None:
    expected = [f"sum {turn} of rank {rank}" for turn in range(3) for rank in range(3)]
    assert run(come_to_different_sums, by, ranks=3) == [expected] * 3


def ask_late_what_differed() -> list[list[str]]:
    """The worker is several operations further when anybody asks how the first ones ended."""
    with a_team() as team:
        flats = [data(team.rank, 100, seed=i) for i in range(6)]
        jobs = []
        for i, flat in enumerate(flats):
            label = f"job {i} of rank {team.rank}" if i in (0, 2) else "the same"
            jobs.append(team.submit(op_of(OpKind.SMALL, flat, label=label)))
        wait(jobs[-1])
        said = []
        for i in (0, 2):
            with pytest.raises(LabelsDiffer) as caught:
                wait(jobs[i])
            said.append(caught.value.labels)
        for i in (1, 3, 4, 5):
            wait(jobs[i])
            assert torch.equal(flats[i], truth(100, seed=i))
        return said


def test_a_job_keeps_the_labels_that_it_found_different(run: Callable[..., Any]) -> None:
    expected = [[f"job {i} of rank {rank}" for rank in range(3)] for i in (0, 2)]
    assert run(ask_late_what_differed, ranks=3) == [expected] * 3


# The end


def abort_alone() -> list[str]:
    """Rank 0 waits for sums that nobody else comes to, until it is told to give up."""
    said: list[str] = []
    flats = [torch.ones(10) for _ in range(4)]
    with a_team() as team:
        if team.rank == 0:
            waiting = [team.submit(op_of(kind, flats[kind])) for kind in (OpKind.SMALL, OpKind.STAGED)]
            op = op_of(OpKind.SMALL, flats[1])
            thread = threading.Thread(target=lambda: said.append(_error(lambda: advance(team, op, LANE))))
            thread.start()
            assert not waiting[0].wait(0.0)
            team.abort()
            thread.join(BOUND_S)
            said += [_error(lambda job=job: wait(job)) for job in waiting]  # type: ignore[misc]
            said.append(_error(lambda: by_worker(team, op_of(OpKind.SMALL, flats[3]))))
    return said


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except TeamError as error:
        return str(error)
    return "nothing"


def test_abort_ends_what_waits_and_what_comes_after(run: Callable[..., Any]) -> None:
    first, second = run(abort_alone)
    assert (first, second) == (["the operation was given up"] * 4, [])


def post_after_abort() -> bool:
    """What rank 0 said before it gave up is what rank 1 finds, however often rank 0 tries again."""
    with a_team() as team:
        flat, other = torch.full((10,), 5.0 if team.rank == 0 else 1.0), torch.full((10,), 9.0)
        if team.rank == 0:
            assert not team.advance(WORKER, op_of(OpKind.SMALL, flat), 0.0)
            team.abort()
            for _ in range(3):
                assert _error(lambda: advance(team, op_of(OpKind.SMALL, other))) != "nothing"
        dist.barrier()
        if team.rank == 1:
            advance(team, op_of(OpKind.SMALL, flat))
            return flat.tolist() == [6.0] * 10
    return True


def test_nothing_is_posted_after_abort(run: Callable[..., Any]) -> None:
    assert run(post_after_abort) == [True, True]


def lose_a_rank() -> list[str]:
    """Rank 2 never comes, and rank 0 knows it to be dead; rank 0 had more to do."""
    lane = open_lane(dist.group.WORLD, Guard(), BOUND_S)  # type: ignore[arg-type]
    with _ended_process() as pidfd:
        team = Team(lane.exchange, [0, 1, 2], lane.groups.rank, {2: pidfd} if lane.groups.rank == 0 else {}, 64)
    flats = [torch.ones(10) for _ in range(3)]
    said = []
    if team.rank == 0:
        jobs = [team.submit(op_of(OpKind.SMALL, flat)) for flat in flats]
        said = [_error(lambda job=job: wait(job)) for job in jobs]  # type: ignore[misc]
    dist.barrier()
    if team.rank == 1:
        said = [str(team.advance(WORKER, op_of(OpKind.SMALL, flats[0]), 0.05)), str(flats[0][0].item())]
    dist.barrier()
    team.close()
    lane.close(together=True)
    return said


@contextmanager
def _ended_process() -> Iterator[int]:
    process = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(process.pid)
    process.wait()
    yield pidfd
    os.close(pidfd)


def test_who_lost_a_rank_does_not_stand_in_for_it(run: Callable[..., Any]) -> None:
    """The worker once went on to the next job, and its post counted as that of the rank that was missing."""
    first, second, _ = run(lose_a_rank, ranks=3)
    assert first == ["rank 2 ended while others waited for it"] + ["the operation was given up"] * 2
    assert second == ["False", "1.0"]


def spin_while_the_worker_adds() -> bool:
    """No other thread gets the interpreter: what arrives in memory was put there by C alone."""
    with a_team() as team:
        flat = torch.full((100_000,), float(team.rank + 1))
        seen = memoryview(flat.numpy())
        dist.barrier()
        before = sys.getswitchinterval()
        sys.setswitchinterval(3600)
        try:
            job = team.submit(op_of(OpKind.STAGED, flat))
            deadline = time.perf_counter() + 30
            while (seen[0], seen[99_999]) != (6.0, 6.0) and time.perf_counter() < deadline:
                pass
            arrived = (seen[0], seen[99_999]) == (6.0, 6.0)
        finally:
            sys.setswitchinterval(before)
        wait(job)
    return arrived


def test_the_worker_needs_no_interpreter(run: Callable[..., Any]) -> None:
    assert run(spin_while_the_worker_adds, ranks=3) == [True] * 3


# Boards


def post_and_collect() -> None:
    with a_team(board_nbytes=100) as team:
        rows = torch.empty(team.size, 100, dtype=torch.uint8)
        positions = torch.arange(100)
        assert team.fits(rows[0])
        assert not team.fits(torch.empty(101, dtype=torch.uint8))
        for turn in range(1000):
            said = [((positions * (rank + 1) + turn) % 256).to(torch.uint8) for rank in range(team.size)]
            team.post(said[team.rank])
            while not team.collect(rows, 0.1):
                pass
            assert torch.equal(rows, torch.stack(said)), turn


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_thousand_messages_from_each_to_all(ranks: int, run: Callable[..., Any]) -> None:
    run(post_and_collect, ranks=ranks)
