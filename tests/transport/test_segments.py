"""Shared memory: what one writes the others read; it has no name and goes with its last tensor; lack of it is told."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gradsync.errors import NotEnoughMemory
from gradsync.plan.guard import Guard
from gradsync.transport import cgroups, segments
from gradsync.transport.lane import Lane, open_lane
from gradsync.transport.segments import Segment, allocate, available_nbytes

PAGE = 4096


@contextmanager
def a_lane() -> Iterator[Lane]:
    lane = open_lane(dist.group.WORLD, Guard(), 60)  # type: ignore[arg-type]
    yield lane
    dist.barrier()
    lane.close(together=True)


@contextmanager
def limited(nbytes: int, rank: int) -> Iterator[None]:
    """On this rank no file, so no piece of memory either, may be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def take(lane: Lane, nbytes: int) -> tuple[torch.Tensor, Segment]:
    return allocate(lane.exchange, range(lane.groups.size), lane.groups.rank, nbytes)


def open_segments() -> list[str]:
    """What this process holds of any segment: descriptors and mappings. What is only garbage is collected first."""
    gc.collect()
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if "gradsync-segment" in line]
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        found += [target] if "gradsync-segment" in target else []
    return found


def view_of(segment: Segment, rank: int, nbytes: int) -> bytes:
    """A rank's piece as it lies in this process."""
    return ctypes.string_at(segment.bases(0)[rank], nbytes)


# What it is


def write_and_read() -> None:
    with a_lane() as lane:
        for nbytes in (1, PAGE, PAGE + 1, 1 << 20):
            memory, segment = take(lane, nbytes)
            assert memory.numel() >= nbytes
            assert not bool(memory.any()), "new memory holds zeros"
            assert (segment.begin, segment.nbytes) == (memory.data_ptr(), memory.numel())
            dist.barrier()
            memory.fill_(dist.get_rank() + 1)
            dist.barrier()
            for rank in range(dist.get_world_size()):
                assert view_of(segment, rank, memory.numel()) == bytes([rank + 1]) * memory.numel()
            assert segment.bases(8)[0] - segment.bases(0)[0] == 8
            dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_one_rank_writes_the_others_read(ranks: int, run: Callable[..., Any]) -> None:
    run(write_and_read, ranks=ranks)


def drop() -> dict[str, Any]:
    gc.collect()  # what earlier runs of this process left in cycles
    before = open_segments()
    with a_lane() as lane:
        memory, segment = take(lane, 1 << 20)
        held = len(set(open_segments()) - set(before))
        shown = [name for name in os.listdir("/dev/shm") if "gradsync" in name]
        del segment
        part = memory[4096:8192].view(torch.float32)
        del memory
        part.fill_(3.0)  # a view keeps all of it
        kept = len(set(open_segments()) - set(before))
        del part
        gone = open_segments() == before
    return {"held": held, "shown": shown, "kept": kept, "gone": gone}


def test_memory_has_no_name_and_goes_with_its_last_tensor(run: Callable[..., Any]) -> None:
    for found in run(drop, ranks=3):
        assert found["held"] >= 3, "a mapping of every rank's piece"
        assert (found["shown"], found["kept"], found["gone"]) == ([], found["held"], True)


def test_pages_are_reserved_before_anybody_uses_them() -> None:
    nonce = secrets.token_bytes(16)
    shortage, fd = segments._reserve(10 * PAGE, 1, nonce)
    try:
        assert shortage == ""
        assert os.fstat(fd).st_size == 11 * PAGE
        assert os.fstat(fd).st_blocks * 512 >= 11 * PAGE
        assert os.pread(fd, 16, 10 * PAGE) == nonce
        assert os.get_inheritable(fd) is False
    finally:
        os.close(fd)


# What is not ours


def test_a_forged_record_is_refused() -> None:
    nonce = secrets.token_bytes(16)
    _, fd = segments._reserve(PAGE, 1, nonce)
    pid = os.getpid()
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as short:
        file.write(bytes(2 * PAGE))  # as long, but without the nonce
        short.write(bytes(PAGE))
        file.flush()
        short.flush()
        reader, writer = os.pipe()
        try:
            assert segments._map(pid, fd, secrets.token_bytes(16), PAGE) is None
            assert segments._map(pid, fd, nonce, 2 * PAGE) is None
            assert segments._map(pid, file.fileno(), nonce, PAGE) is None
            assert segments._map(pid, short.fileno(), nonce, PAGE) is None
            assert segments._map(pid, reader, nonce, PAGE) is None
            assert segments._map(pid, 10**6, nonce, PAGE) is None
            assert segments._map(2**22 + 1, fd, nonce, PAGE) is None
            mapping = segments._map(pid, fd, nonce, PAGE)
            assert mapping is not None
            assert mapping.view().numel() == PAGE
        finally:
            for each in (fd, reader, writer):
                os.close(each)


def show_a_forged_record() -> str:
    """Rank 1 brings a descriptor that is not its piece: nobody maps it, all hear of it."""
    with a_lane() as lane:

        def exchange(mine: bytes) -> list[bytes]:
            if lane.groups.rank == 1 and len(mine) == segments._RECORD.size:
                reserved, pid, _, nonce = segments._RECORD.unpack(mine)
                mine = segments._RECORD.pack(reserved, pid, 0, nonce)
            return lane.exchange(mine)

        before = open_segments()
        with pytest.raises(NotEnoughMemory) as caught:
            allocate(exchange, range(3), lane.groups.rank, PAGE)
        caught.value.__traceback__ = None
        assert open_segments() == before
        take(lane, PAGE)
        return str(caught.value)


def test_a_piece_that_nobody_can_map_is_told_to_all(run: Callable[..., Any]) -> None:
    assert run(show_a_forged_record, ranks=3) == ["rank 0 could not map 0.0 MB of every peer's shared memory"] * 3


# Not enough


def ask_for_too_much(nbytes: int) -> str:
    with a_lane() as lane:
        before = open_segments()
        with pytest.raises(NotEnoughMemory) as caught:
            take(lane, nbytes)
        said = str(caught.value)
        memory, segment = take(lane, PAGE)  # the group still works, and what there is can be had
        memory.fill_(1)
        del memory, segment, caught
        assert open_segments() == before
        return said


def test_a_request_that_no_machine_can_serve_says_how_much_was_needed(run: Callable[..., Any]) -> None:
    for said in run(ask_for_too_much, 1 << 50, ranks=3):
        assert said.startswith(
            "gradsync needs 1125899.9 GB of shared memory for each of the 3 ranks of this host, but "
        )
        assert said.endswith("GB are free in all")
    for said in run(ask_for_too_much, 1 << 64, ranks=2):  # beyond what a file can be
        assert said.startswith("gradsync needs 18446744073.7 GB of shared memory for each of the 2 ranks of this host")


def ask_where_one_rank_has_little(victim: int) -> str:
    with a_lane() as lane:
        with limited(1 << 20, victim), pytest.raises(NotEnoughMemory) as caught:
            take(lane, 8 << 20)
        memory, segment = take(lane, 8 << 20)
        memory.fill_(lane.groups.rank)
        dist.barrier()
        assert view_of(segment, 1, 3) == b"\x01\x01\x01"
        dist.barrier()
        return str(caught.value)


@pytest.mark.parametrize("victim", [0, 2])
def test_what_one_rank_lacks_all_lack(victim: int, run: Callable[..., Any]) -> None:
    for rank, said in enumerate(run(ask_where_one_rank_has_little, victim, ranks=3)):
        if rank == victim:
            assert said == (
                "gradsync needs 8.4 MB of shared memory for each of the 3 ranks of this host, "
                "but it cannot be reserved (File too large)"
            )
        else:
            assert said == f"gradsync needs 8.4 MB of shared memory on every rank, but rank {victim} has not got it"


def ask_in_a_small_container() -> str:
    """Its limit is reached by all ranks of the host together, and is no limit of the machine."""
    with a_lane() as lane:
        with patch.object(cgroups, "free_memory_nbytes", return_value=64 << 20), pytest.raises(NotEnoughMemory) as lack:
            take(lane, 40 << 20)
        memory, _ = take(lane, 40 << 20)
        memory.fill_(1)
        return str(lack.value)


def test_the_limit_of_the_container_counts(run: Callable[..., Any]) -> None:
    for said in run(ask_in_a_small_container):
        assert said == (
            "gradsync needs 41.9 MB of shared memory for each of the 2 ranks of this host, but 67.1 MB are free in all"
        )


def test_what_is_available_is_a_number_below_the_machine() -> None:
    available = available_nbytes()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available is None or 0 < available <= total
