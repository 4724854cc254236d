"""Heartbeats among simulated hosts: what they cost each, and how long until everybody has heard of a death.

Each host's speaker is gradsync's own, and so is what every other rank of it reads of the note that the speaker leaves,
and what a rank concludes from all that; they are driven as `transport/other_hosts.py` and `liveness.py` do it. Links,
clocks and pages are made up.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from statistics import mean
from typing import Any

from gradsync.algorithms.control_tree import ControlTree
from gradsync.transport.blame import PeerView, lost
from gradsync.transport.heartbeat import Phase, RankState
from gradsync.transport.notable_ranks import NotableRank
from gradsync.transport.other_hosts import HeardFromSpeaker
from gradsync.transport.speaker import PERIOD_S, Speaker
from scale.simulated import hosts_of

TICK_S, LOOK_S, LATENCY_S = 0.1, 0.25, 1e-4  # as `transport/liveness.py` has them; a slow network
DEAD_AFTER_S = 10.0
WARM_S, COUNTED_S = 4.0, 4.0
STEP = 7


class SimulatedHost:
    """One speaker with its clock, which began whenever it began."""

    def __init__(self, tree: ControlTree, host: tuple[int, ...], ranks: int, phase_s: float) -> None:
        self.rank = host[0]
        self.speaker = Speaker(tree, self.rank, ranks, DEAD_AFTER_S)
        self.inbox: list[tuple[float, int, bytes]] = []
        self.closed: list[int] = []
        self.next_s, self.last_s, self.looked_s = phase_s, phase_s, -1.0
        self.mine = [NotableRank(rank, RankState(0, STEP, Phase.WAITING, -1, ())) for rank in host]
        self.note, self.noted_s = (0, b""), phase_s
        self.mates = {rank: HeardFromSpeaker(lambda: self.note, ranks) for rank in host[1:]}

    def turn(self, now: float) -> list[tuple[int, bytes]]:
        """Hear, and say what is due."""
        ripe = [each for each in self.inbox if each[0] <= now]
        self.inbox = [each for each in self.inbox if each[0] > now]
        for _, neighbour, text in ripe:
            self.speaker.heard(neighbour, text)
        for neighbour in self.closed:
            self.speaker.closed(neighbour)
        self.closed.clear()
        look = now - self.looked_s >= LOOK_S
        self.looked_s = now if look else self.looked_s
        elapsed, self.last_s = now - self.last_s, now
        self.next_s = now + TICK_S
        messages = self.speaker.tick(elapsed, self.mine if look else None)
        if self.mates and (ripe or messages or now - self.noted_s >= PERIOD_S):
            self.note, self.noted_s = (self.note[0] + 1, self.speaker.summary()), now
        return messages

    def readers(self) -> dict[int, Speaker | HeardFromSpeaker]:
        """What each rank of this host that lives reads."""
        alive = {each.rank for each in self.mine if not each.dead}
        return {rank: reader for rank, reader in {self.rank: self.speaker, **self.mates}.items() if rank in alive}


def lost_to(reader: Speaker | HeardFromSpeaker, mine: list[NotableRank]) -> list[int]:
    """Whom a rank would call lost that hears this of others, and sees its own host."""
    seen = [*reader.known(), *mine]
    return lost({each.rank: PeerView(*each[1:]) for each in seen}, STEP)


class Hosts:
    """All of them, in one queue of turns."""

    def __init__(self, ranks: int, per_host: int) -> None:
        tree, chance = ControlTree(hosts_of(ranks, per_host)), random.Random(1)
        self.hosts = {
            host[0]: SimulatedHost(tree, host, ranks, chance.uniform(0, TICK_S)) for host in hosts_of(ranks, per_host)
        }
        self.tree = tree
        self.now = 0.0
        self.messages: Counter[int] = Counter()
        self.nbytes: Counter[int] = Counter()
        self.python_s: Counter[int] = Counter()
        self.num_readers = 0

    def run(self, seconds: float) -> None:
        """Everybody takes its turns; who speaks to nobody has none."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + TICK_S / 4, end)
            for host in list(self.hosts.values()):
                if host.next_s <= self.now and host.speaker.neighbours:
                    begun = time.thread_time()
                    messages = host.turn(self.now)
                    self.python_s[host.rank] += time.thread_time() - begun
                    for to, text in messages:
                        self.messages[host.rank] += 1
                        self.nbytes[host.rank] += len(text)
                        if to in self.hosts:
                            self.hosts[to].inbox.append((self.now + LATENCY_S, host.rank, text))

    def lose(self, rank: int, closed: bool) -> None:
        """A host stops, without a word; `closed`: its kernel ends its connections."""
        neighbours = self.hosts.pop(rank).speaker.neighbours
        for neighbour in neighbours if closed else ():
            self.hosts[neighbour].closed.append(rank)

    def kill(self, rank: int) -> None:
        """One rank of a host ends; the first one sees it."""
        host = next(host for host in self.hosts.values() if rank in host.mates)
        host.mine = [each._replace(dead=each.dead or each.rank == rank) for each in host.mine]

    def until_named(self, victim: int) -> float:
        """Seconds until all ranks that live would name it, and nobody else."""
        begun = self.now
        deaf = {rank: (host, reader) for host in self.hosts.values() for rank, reader in host.readers().items()}
        self.num_readers = len(deaf)
        readers = dict(deaf)
        while deaf:
            assert self.now - begun < 3 * DEAD_AFTER_S, f"{len(deaf)} ranks never hear of {victim}, {min(deaf)} first"
            self.run(TICK_S / 2)
            for _, reader in deaf.values():
                if isinstance(reader, HeardFromSpeaker):
                    reader.turn(TICK_S / 2, None)
            deaf = {rank: each for rank, each in deaf.items() if victim not in lost_to(each[1], _but(each[0], rank))}
        wrong = {who for rank, (host, reader) in readers.items() for who in lost_to(reader, _but(host, rank))} - {
            victim
        }
        assert not wrong, f"{sorted(wrong)[:5]} are blamed though they live"
        return self.now - begun


def _but(host: SimulatedHost, rank: int) -> list[NotableRank]:
    return [each for each in host.mine if each.rank != rank]


def measure(ranks: int, per_host: int) -> dict[str, Any]:
    """A quiet time, then the death of a host in the middle of the tree, of one at its edge, and of the root."""
    hosts = Hosts(ranks, per_host)
    hosts.run(WARM_S)
    assert all(host.speaker.complete for host in hosts.hosts.values())
    for counted in (hosts.messages, hosts.nbytes, hosts.python_s):
        counted.clear()
    hosts.run(COUNTED_S)
    speakers = list(hosts.hosts)
    messages = [hosts.messages[rank] / COUNTED_S for rank in speakers]
    result: dict[str, Any] = {
        "ranks": ranks,
        "per_host": per_host,
        "speakers": len(speakers),
        "messages_per_s": {"mean": mean(messages), "most": max(messages)},
        "nbytes_per_s": {"mean": mean(hosts.nbytes[rank] / COUNTED_S for rank in speakers)},
        "python_ms_per_s": {
            "mean": mean(1e3 * hosts.python_s[rank] / COUNTED_S for rank in speakers),
            "most": max(1e3 * hosts.python_s[rank] / COUNTED_S for rank in speakers),
        },
        "store_requests_per_s": 0,
        "named_after_s": {},
    }
    victims = {
        "at the edge": (speakers[-1], False),
        "in the middle": (_inner(hosts.tree), False),
        "the root": (hosts.tree.root, True),
        "one rank": (ranks // 2 + per_host - 1, True),
    }
    for what, (rank, closed) in victims.items():
        if len(hosts.hosts) < 4 or rank < 0 or (what == "one rank" and per_host == 1):
            continue
        if rank in hosts.hosts:
            hosts.lose(rank, closed)
        else:
            hosts.kill(rank)
        how = "seen by its host" if what == "one rank" else "its connections end" if closed else "without a word"
        result["named_after_s"][f"{what}, {how}"] = hosts.until_named(rank)
        result["named_by"] = hosts.num_readers
        break_even = Hosts(ranks, per_host)  # the next one dies alone
        break_even.run(WARM_S)
        hosts = break_even
    return result


def _inner(tree: ControlTree) -> int:
    """A rank that leads a subgroup and is not the root."""
    led = [subgroup.leader for level in tree.levels[1:] for subgroup in level if subgroup.leader != tree.root]
    return led[len(led) // 2] if led else -1
