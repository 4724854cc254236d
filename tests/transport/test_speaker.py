"""Speakers: every death is named by all who are left, nothing else is, and a stall is ridden out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradsync.algorithms.control_tree import ControlTree
from gradsync.transport.heartbeat import Phase, RankState
from gradsync.transport.notable_ranks import (
    MAX_NAMED,
    MOST,
    SUMMARY_NBYTES,
    HostSummary,
    NotableRank,
    decode_summary,
    encode_summary,
    most_notable,
)
from gradsync.transport.speaker import PERIOD_S, Speaker

TICK_S = 0.25
DEAD_AFTER = 5.0
LAW = settings(max_examples=40, deadline=None)


class World:
    """The speakers of all hosts, and a network between them in which a message takes no time."""

    def __init__(self, sizes: list[int], fan_out: int) -> None:
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
        self.size = ends[-1]
        self.hosts = tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))
        self.tree = ControlTree(self.hosts, fan_out)
        self.first = [host[0] for host in self.hosts]
        self.speakers = {rank: Speaker(self.tree, rank, self.size, DEAD_AFTER) for rank in self.first}
        self.states = {rank: RankState(0, 1, Phase.BACKWARD, -1, ()) for rank in range(self.size)}
        self.dead: set[int] = set()  # processes that ended
        self.stopped: set[int] = set()  # processes that stand still
        self.held: set[int] = set()  # those whose interpreter does
        self.network = True
        self.num_messages = 0

    def run(self, seconds: float, lost: Iterable[bool] = ()) -> None:
        """Time passes; `lost` says of each message whether it is."""
        fate = iter(lost)
        for _ in range(round(seconds / TICK_S)):
            for rank, speaker in self.speakers.items():
                if rank in self.dead | self.stopped | self.held:
                    continue
                self._see(rank, speaker)
                for neighbour, text in speaker.tick(TICK_S, self._host(rank), self._passes(speaker)):
                    self.num_messages += 1
                    silent = self.dead | self.stopped | self.held
                    if self.network and neighbour not in silent and not next(fate, False):
                        self.speakers[neighbour].heard(rank, text)

    def _see(self, rank: int, speaker: Speaker) -> None:
        for neighbour in speaker.neighbours:
            if neighbour in self.dead and self.network:
                speaker.closed(neighbour)
        for neighbour in speaker.doubtful():
            if self.network and neighbour not in self.dead | self.stopped:
                speaker.vouched(neighbour)

    def _passes(self, speaker: Speaker) -> bool:
        """What the kernels of all neighbours would say."""
        return self.network and speaker.quiet

    def host_of(self, first: int) -> tuple[int, ...]:
        return next(host for host in self.hosts if host[0] == first)

    def _host(self, first: int) -> list[NotableRank]:
        return [NotableRank(rank, self.states[rank], dead=rank in self.dead) for rank in self.host_of(first)]

    @property
    def alive(self) -> dict[int, Speaker]:
        return {rank: each for rank, each in self.speakers.items() if rank not in self.dead | self.stopped}

    def gone(self, rank: int) -> set[int]:
        """Whom this speaker holds for gone, of other hosts."""
        return {each.rank for each in self.speakers[rank].known() if each.dead or each.silent}


worlds = st.builds(World, st.lists(st.integers(1, 4), min_size=2, max_size=12), st.integers(2, 5))


@given(worlds, st.data())
@LAW
def test_every_death_is_named_by_all_within_the_depth_of_the_tree(world: World, data: st.DataObject) -> None:
    world.run(3.0)
    victim = data.draw(st.integers(0, world.size - 1))
    world.dead = {victim}
    world.run((2 * world.tree.depth + 2) * TICK_S)
    for rank in world.alive:
        assert world.gone(rank) == ({victim} if victim not in world.host_of(rank) else set())


@given(worlds, st.data())
@LAW
def test_a_stopped_speaker_is_named_by_all_within_dead_after_and_a_second(world: World, data: st.DataObject) -> None:
    world.run(3.0)
    victim = data.draw(st.sampled_from(world.first))
    world.stopped = {victim}
    world.run(DEAD_AFTER - PERIOD_S - TICK_S)  # it may have spoken so long before it was stopped
    assert all(world.gone(rank) == set() for rank in world.alive)
    world.run(PERIOD_S + 1.0 + 2 * world.tree.depth * TICK_S)
    assert all(world.gone(rank) == {victim} for rank in world.alive)
    world.stopped = set()
    world.run(2.0)  # it goes on: nobody holds it for gone any more
    assert all(world.gone(rank) == set() for rank in world.alive)


@given(worlds, st.data())
@LAW
def test_of_two_that_die_at_once_each_is_named_by_its_neighbours_and_one_by_all(
    world: World, data: st.DataObject
) -> None:
    assume(len(world.hosts) > 2)
    world.run(3.0)
    victims = data.draw(st.lists(st.sampled_from(world.first), min_size=2, max_size=2, unique=True))
    world.dead = set(victims)
    world.run(3.0)
    named = [world.gone(rank) for rank in world.alive]
    watched = {other for speaker in world.alive.values() for other, judged in speaker.neighbours.items() if judged}
    assert set().union(*named) == set(victims) & watched
    assert all(named)


@given(worlds, st.lists(st.booleans(), max_size=400))
@LAW
def test_nobody_is_named_when_nobody_died(world: World, lost: list[bool]) -> None:
    """Messages are lost, but never for as long as dead_after."""
    per_period = max(1, sum(len(each.neighbours) for each in world.speakers.values()))
    world.run(3.0)
    for begin in range(0, len(lost), 4 * per_period):
        world.run(4 * PERIOD_S, lost[begin : begin + 4 * per_period])
        assert all(world.gone(rank) == set() for rank in world.alive)
        world.run(2 * PERIOD_S)


@given(worlds, st.floats(1.0, 60.0))
@LAW
def test_a_stall_of_the_whole_network_makes_nobody_dead(world: World, stall_s: float) -> None:
    world.run(3.0)
    world.network = False
    world.run(stall_s)
    assert all(world.gone(rank) == set() for rank in world.alive)
    if stall_s > 3:
        assert all(each.unheard_s > 0 for rank in world.alive for each in world.speakers[rank].known())
    world.network = True
    world.run(3.0)
    for rank in world.alive:
        assert world.gone(rank) == set()
        assert not any(each.unheard_s for each in world.speakers[rank].known())


def test_after_a_stall_connections_recover_one_by_one() -> None:
    """One neighbour is heard again while TCP still pauses on the connection to another: that one is not dead."""
    world = World([1] * 3, 4)
    world.run(3.0)
    speaker, texts = world.speakers[0], {rank: dict(world.speakers[rank].tick(1.0))[0] for rank in (1, 2)}

    def pass_time(seconds: float, heard: list[int]) -> set[int]:
        for _ in range(round(seconds / TICK_S)):
            for rank in heard:
                speaker.heard(rank, texts[rank])
            speaker.tick(TICK_S)
        return world.gone(0)

    assert pass_time(20.0, []) == set()
    assert pass_time(15.0, [1]) == set()
    assert pass_time(10.0, [1]) == {2}


@given(worlds, st.data())
@LAW
def test_a_held_speaker_is_late(world: World, data: st.DataObject) -> None:
    world.run(3.0)
    victim = data.draw(st.sampled_from(world.first))
    world.held = {victim}
    world.run(4 * DEAD_AFTER)
    for rank in set(world.alive) - {victim}:
        assert world.gone(rank) == set()
        if victim in world.speakers[rank].neighbours and world.speakers[rank].neighbours[victim]:
            [seen] = [each for each in world.speakers[rank].known() if each.rank == victim]
            assert seen.held_s >= 4 * DEAD_AFTER - 1
            assert seen.unheard_s == 0
    world.held, world.stopped = set(), {victim}  # and then it stops for good
    world.run(2 * DEAD_AFTER)
    assert all(victim in world.gone(rank) for rank in world.alive)


def test_a_single_neighbour_without_power_is_not_told_from_a_stall() -> None:
    world = World([1, 1], 2)
    world.run(3.0)
    world.network = False
    world.stopped = {1}
    world.run(100.0)
    [seen] = world.speakers[0].known()
    assert not seen.silent
    assert seen.unheard_s >= 99


@given(worlds)
@LAW
def test_all_hear_of_all_and_know_when_that_is_so(world: World) -> None:
    assert not any(speaker.complete for speaker in world.speakers.values())
    world.run(2 * PERIOD_S + 2 * world.tree.depth * TICK_S)
    for speaker in world.speakers.values():
        assert speaker.complete
        summary = decode_summary(speaker.summary(), world.size)
        assert summary is not None
        assert summary.num_ranks == world.size
        assert len(summary.notable) == min(world.size, MOST)
        assert len({each.rank for each in summary.notable}) == len(summary.notable)


@given(worlds, st.data())
@LAW
def test_news_goes_at_once_and_the_rest_twice_a_second(world: World, data: st.DataObject) -> None:
    world.run(3.0)
    victim = data.draw(st.integers(0, world.size - 1))
    world.states[victim] = RankState(0, 1, Phase.LOST_PEER, -1, (0,))
    world.run((2 * world.tree.depth + 1) * TICK_S)
    for rank, speaker in world.speakers.items():
        if victim not in world.host_of(rank):
            assert next(each for each in speaker.known() if each.rank == victim).state.culprits == (0,)
    before = world.num_messages
    world.run(10 * PERIOD_S)
    links = sum(len(speaker.neighbours) for speaker in world.speakers.values())
    assert world.num_messages - before <= 11 * links


@pytest.mark.parametrize("hosts", [64, 1024])
def test_what_a_speaker_sends_does_not_grow_with_the_group(hosts: int) -> None:
    tree = ControlTree(tuple((rank,) for rank in range(hosts)))
    most = [len(Speaker(tree, rank, hosts, DEAD_AFTER).neighbours) for rank in range(hosts)]
    assert sorted(most)[hosts // 2] <= 3  # of most: its parent, and the two beside it
    assert max(most) <= 15 * tree.depth


# --- what is said ---

STATES = st.builds(
    RankState,
    st.just(0),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from(Phase),
    st.integers(-1, 2**31 - 1),
    st.lists(st.integers(0, 2**31 - 1), max_size=MAX_NAMED).map(tuple),
)
FLOATS = st.floats(0, 1e6, width=32)
RANKS = st.builds(NotableRank, st.integers(0, 99), STATES, st.booleans(), st.booleans(), FLOATS, FLOATS)


@given(st.lists(RANKS, min_size=1, max_size=MOST), st.integers(0, 50))
def test_a_summary_carries_what_was_said(ranks: list[NotableRank], more: int) -> None:
    said = HostSummary(tuple(ranks), len(ranks) + more)
    text = encode_summary(said)
    assert len(text) == SUMMARY_NBYTES
    assert decode_summary(text, 100) == said


@given(st.binary(max_size=2 * SUMMARY_NBYTES) | st.binary(min_size=SUMMARY_NBYTES, max_size=SUMMARY_NBYTES))
def test_what_is_no_summary_changes_nothing(text: bytes) -> None:
    decode_summary(text, 100)  # raises nothing
    world = World([1, 1], 2)
    world.speakers[0].heard(1, text)
    assert all(0 <= each.rank < 2 for each in world.speakers[0].known())


@given(st.lists(RANKS, max_size=80))
def test_who_is_gone_comes_before_who_is_late(ranks: list[NotableRank]) -> None:
    chosen = most_notable(ranks)
    lost = [each for each in ranks if (each.dead or each.silent) and each.state.phase < Phase.FAILED]
    assert all(each in chosen for each in lost) or len(lost) > MOST
    at_work = [each.state.step for each in chosen if each.alarm is None]
    assert at_work == sorted(at_work)
    if at_work:
        left_out = [each.state.step for each in ranks if each not in chosen]
        assert all(step >= at_work[-1] for step in left_out)
