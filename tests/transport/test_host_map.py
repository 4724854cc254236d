"""The map of hosts, from what blocks of ranks say to what everybody reads."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import GradSyncError
from gradsync.transport.host_map import HostMap, joined, numbers, published, read_map, said, summary, together, united

IDENTITIES = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), min_size=1, max_size=40)


def through_blocks(identities: list[bytes], block: int, fan_out: int = 3) -> bytes:
    """What everybody reads, when blocks of so many ranks say theirs and some of them are joined first."""
    size, of = len(identities), dict(enumerate(identities))
    parts = [
        summary({rank: of[rank] for rank in range(first, min(first + block, size))}) for first in range(0, size, block)
    ]
    halves = [joined(parts[first : first + fan_out], size) for first in range(0, len(parts), fan_out)]
    return published(joined(halves, size), size)


@given(IDENTITIES, st.integers(1, 9))
def test_blocks_come_to_the_map_of_those_who_know_all(identities: list[bytes], block: int) -> None:
    read = read_map(through_blocks(identities, block), len(identities))
    assert read.hosts == together(dict(enumerate(identities))).hosts
    assert all(rank in read.mates(rank) for rank in range(len(identities)))


@pytest.mark.parametrize("size", [256, 16384])
@pytest.mark.parametrize("layout", ["in order", "dealt out in turns", "alone", "one host", "in halves"])
def test_regular_hosts_take_a_line_however_many_they_are(layout: str, size: int) -> None:
    of = {
        "in order": lambda rank: rank // 8,
        "dealt out in turns": lambda rank: rank % (size // 8),
        "alone": lambda rank: rank,
        "one host": lambda rank: 0,
        "in halves": lambda rank: rank % (size // 2) // 4,
    }[layout]
    text = through_blocks([b"%d" % of(rank) for rank in range(size)], 64, 64)
    assert len(text) < 60
    assert read_map(text, size).mates(size - 1) == tuple(rank for rank in range(size) if of(rank) == of(size - 1))


@given(IDENTITIES, st.sets(st.integers(0, 3)))
def test_only_broken_hosts_fall_apart(identities: list[bytes], broken: set[int]) -> None:
    found = together(dict(enumerate(identities)))
    after = found.without(broken)
    assert sorted(rank for host in after.hosts for rank in host) == list(range(len(identities)))
    assert list(after.hosts) == sorted(after.hosts)
    for number, host in enumerate(found.hosts):
        assert [after.mates(rank) for rank in host] == [(rank,) if number in broken else host for rank in host]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x80\x04.",
        b"{}",
        b"null",
        b"[" * 100_000,
        b"[[[[0,4,1]],1,0]",
        b"[[[[0,3,1]],1,0]]",  # a rank is missing
        b"[[[[0,4,1]],2,0]]",  # ranks twice
        b"[[[[0,5,1]],1,0]]",
        b"[[[[0,1,1]],4000000000,1]]",
        b"[[[[0,4000000000,1]],1,0]]",
        b"[[[[0,4,0]],1,0]]",
        b"[[[[-1,4,1]],1,0]]",
        b"[[[[true,4,1]],1,0]]",
        b"[[[[0,4.0,1]],1,0]]",
        b"[[[],4,0]]",
        b"[[[[0,0,1]],4,0]]",
        b'[["abc",1,0]]',
    ],
)
def test_what_is_no_map_is_refused(text: bytes) -> None:
    with pytest.raises(GradSyncError, match="no map of 4 ranks"):
        read_map(text, 4)


@given(st.binary(max_size=30))
def test_any_bytes_are_a_map_or_refused(text: bytes) -> None:
    with contextlib.suppress(GradSyncError):
        assert isinstance(read_map(text, 3), HostMap)


def test_numbers_travel_and_others_are_refused() -> None:
    assert numbers(united([said([1, 3]), said([]), said([0, 3])], 4), 4) == [0, 1, 3]
    for text in [b"[4]", b"[1,1]", b"[2,1]", b'["1"]', b"[true]", b"{}", b"", b"[0,1,2,3,4]"]:
        with pytest.raises(GradSyncError, match="no map of 4 ranks"):
            numbers(text, 4)
