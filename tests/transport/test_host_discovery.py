"""How many ranks find out who shares a host: simulated, with rounds and requests counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import PeerLost, SyncTimeout
from gradsync.transport.store_tree import BLOCK
from simulated_store import SimulatedMeeting

MOST_ROUNDS = 12  # at 1024 ranks
# Of one rank, whatever the size of the group: its block's part and two values for all; a first rank's subgroup too.
MOST_REQUESTS = 32

LAYOUTS: dict[str, Callable[[int, int], str]] = {
    "in order": lambda rank, size: f"{rank // 8}",
    "interleaved": lambda rank, size: f"{rank % (size // 8)}",
    "irregular": lambda rank, size: f"{int(rank**0.8)}",
    "alone": lambda rank, size: f"{rank}",
    "one large host": lambda rank, size: "large" if rank % 5 == 0 and rank < 500 else f"{rank // 8}",
}


def names(layout: str, size: int) -> list[str]:
    return [LAYOUTS[layout](rank, size) for rank in range(size)]


def expected(hosts: list[str]) -> tuple[tuple[int, ...], ...]:
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return tuple(sorted(map(tuple, members.values())))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [256, 1024])
def test_many_ranks_find_the_same_map_in_few_rounds(size: int, layout: str) -> None:
    hosts = names(layout, size)
    meeting = SimulatedMeeting(hosts).run(MOST_ROUNDS)
    assert len(meeting.found) == size
    assert meeting.hosts() == expected(hosts)
    assert max(meeting.requests().values()) <= MOST_REQUESTS


def test_what_a_rank_asks_does_not_grow_with_the_number_of_ranks() -> None:
    medians = []
    for size in [128, 1024, 2048]:
        requests = sorted(SimulatedMeeting(names("in order", size)).run(MOST_ROUNDS).requests().values())
        medians.append(requests[size // 2])
        assert requests[-1] <= MOST_REQUESTS
    assert medians[0] >= medians[1] == medians[2]


@pytest.mark.parametrize("size", [2, 8, BLOCK])
def test_one_block_meets_in_three_rounds_and_publishes_nothing(size: int) -> None:
    meeting = SimulatedMeeting(names("in order", max(size, 8))[:size]).run(3)
    assert len(meeting.hosts()) == -(-size // 8)


@pytest.mark.parametrize("layout", ["in order", "interleaved"])
def test_hosts_that_are_not_mutually_visible_fall_apart_and_no_others(layout: str) -> None:
    hosts = names(layout, 256)
    whole = expected(hosts)
    broken = [whole[3], whole[17]]
    blind = [(broken[0][1], broken[0][5]), (broken[1][7], broken[1][0]), (0, 255)]  # the last are on two hosts
    meeting = SimulatedMeeting(hosts, blind).run(MOST_ROUNDS)
    apart = [(rank,) for host in broken for rank in host]
    assert meeting.hosts() == tuple(sorted([host for host in whole if host not in broken] + apart))
    for rank in broken[0]:
        assert meeting.sights[rank].heard, "who is out of view for anybody writes to the store"


def test_a_rank_listens_to_its_block_and_the_keeper_of_the_store_only() -> None:
    meeting = SimulatedMeeting(names("in order", 1024)).run()
    for rank, sight in meeting.sights.items():
        heard = {other for others in sight.heard for other in others}
        block = {
            other for other in range(rank // BLOCK * BLOCK, rank // BLOCK * BLOCK + BLOCK) if other // 8 != rank // 8
        }
        first = rank % BLOCK == 0
        beyond = {other for other in (range(0, 1024, BLOCK) if first else [0]) if other // 8 != rank // 8}
        assert heard == block | beyond


@given(st.data())
def test_whoever_does_not_come_is_named_by_all_others(data: st.DataObject) -> None:
    size, block = data.draw(st.integers(2, 60)), data.draw(st.integers(2, 9))
    absent = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=min(4, size - 1)))
    hosts = [f"{rank // 3}" for rank in range(size)]
    meeting = SimulatedMeeting(hosts, absent=absent, block=block, patience=30).run(100, seconds=0.5)
    assert meeting.errors.keys() == set(range(size)) - absent
    for rank, error in meeting.errors.items():
        assert isinstance(error, SyncTimeout)
        assert set(error.ranks) == absent
        assert str(error).startswith(f"[rank {rank}/{size}] waited 30 s in attach, but ")
        assert "did not come; every rank of the group must call it" in str(error)
        assert set(meeting.found[rank].absent) == absent


def test_who_gave_up_first_is_not_missed_by_those_who_wait_longer() -> None:
    meeting = SimulatedMeeting(names("in order", 256), absent=[70], patience=30)
    meeting.turn(0.5)
    for rank in range(0, 256, 3):
        meeting.lose(rank)
        meeting.found[rank].tree.take_back()
    meeting.run(100, seconds=0.5)
    assert len(meeting.errors) == 169
    assert all(error.ranks == (70,) for error in meeting.errors.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("lost", [0, 1, 128, 200, 255])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5])
def test_who_comes_and_goes_no_further_is_named_by_all_others(lost: int, rounds: int) -> None:
    meeting = SimulatedMeeting(names("in order", 256), patience=30)
    for _ in range(rounds):
        meeting.turn()
    meeting.lose(lost)
    meeting.run(200, seconds=0.5)
    for error in meeting.errors.values():
        assert (type(error), error.ranks) == (SyncTimeout, (lost,))
        assert "came and went no further" in str(error)
    assert len(meeting.errors) in (0, 255) or rounds >= 4  # later some need it no more


def test_a_death_that_one_rank_saw_is_heard_by_all_at_once() -> None:
    meeting = SimulatedMeeting(names("in order", 1024), patience=600)
    meeting.turn()
    meeting.lose(130)
    for _ in range(10):
        meeting.turn(0.1)
    meeting.tell_lost(131, [130])
    before = meeting.clock.now
    meeting.run(40, seconds=0.25)
    assert meeting.clock.now - before <= 2.0
    assert len(meeting.errors) == 1022
    for error in meeting.errors.values():
        assert (type(error), error.ranks) == (PeerLost, (130,))
        assert "rank 130 died or fell silent before all had met in attach" in str(error)


def test_a_process_that_is_known_to_have_ended_is_not_waited_for() -> None:
    """Known to one rank alone, from an earlier meeting."""
    meeting = SimulatedMeeting(names("in order", 256), absent=[70], patience=600)
    meeting.sights[71].ended.add(70)
    meeting.turn(0.1)
    assert [*meeting.errors] == [71]
    assert "the process of rank 70 ended before all had met in attach" in str(meeting.errors[71])


def test_waiting_costs_the_store_little() -> None:
    meeting = SimulatedMeeting(names("in order", 1024), absent=[700], patience=600)
    for _ in range(20):
        meeting.turn(0.1)
    before = meeting.requests()
    for _ in range(100):
        meeting.turn(0.1)
    asked = meeting.requests() - before
    assert max(asked.values()) <= 200, "in each turn what it waits for, and now and then who is missing"
