"""The speaker of a host among those of other hosts: who it hears, what it tells whom, and whom it finds silent.

The first rank of each host speaks for it, along the subgroups of the control tree from level 1 on. Twice a second, and
at once when there is news, it tells who leads its subgroup, and those whom it leads, what it knows of all others:

    leader  ◄── everything but what the leader said
      ▲ │
    speaker ─── its own host, from memory
      ▲ │
    led     ◄── everything but what this one said

These pairs are a tree too: so each rank is spoken of once, nothing old goes round for ever, and a message is as long
for 16 ranks as for 16,384. Who only listens in a subgroup is below the first of its members, and needs no pair with it.
A member of a subgroup also beats to the members next to it, which judge nothing, but tell that the network passes.

This class has no thread, clock or socket. A transport, or a simulator, drives it:

    speaker = Speaker(ControlTree(hosts), rank, size, dead_after)
    messages = speaker.tick(elapsed_s, ranks_of_this_host)    several times a second: who is to be told what
    speaker.heard(neighbour, text)          a message has come; what is news goes on with the next tick
    speaker.vouched(neighbour)              its process runs though it says nothing: asked for by `doubtful`
    speaker.closed(neighbour)               its connection ended
    speaker.known()                         the ranks of other hosts worth naming, as seen from here

A tick costs what the neighbours cost, whatever the size of the group.

Note [A stall is not a death]
    Silence alone does not tell a process that stopped from a network that stands still. TCP rides out a stall, and so
    do we: silence counts only while something proves that the network passes.

        another neighbour is heard          the silent one has a fault of its own
        the silent one's kernel has         (`passes` of `tick`) the network passes and the process does not speak: so
        acknowledged what was sent since    it is even where there is only one neighbour
        neither                             the network, or this host, or the other host's power: nobody is blamed, and
                                            the wait ends with its `timeout`

    When a stall is over TCP sends again only after a pause, which may be as long as the stall was, on each
    connection for itself. So the first who is heard does not make the others dead: they have as long.
    A closed connection needs no such proof: what ended it is a process that ended.

                    stop ✕                                  stall ╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳
        one         ├──┬──┬──┬──┬──┬──┬──                   ├──┬──╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳──┬──┬──
        another     ├──┬·· dead_after ··→ silent            ├──┬──╳╳╳╳╳╳╳╳╳╳╳╳╳╳╳ as long again ┬──
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradsync.algorithms.control_tree import ControlTree
from gradsync.transport.heartbeat import Phase
from gradsync.transport.notable_ranks import (
    MOST,
    HostSummary,
    NotableRank,
    decode_summary,
    encode_summary,
    most_notable,
)

PERIOD_S = 0.5  # between two messages to a neighbour
_OVERDUE_S = 1.2 * PERIOD_S  # since the last message
HELD_SHARE = 8  # a rank whose interpreter was held for so many times dead_after is given longer: tokens are few
_LAPSE_S = 3 * PERIOD_S  # so long may lie between two messages of a neighbour without a reason


@dataclass
class _Neighbour:
    """One with whom the speaker talks, and the last it said of its side of the tree."""

    rank: int
    judged: bool  # who leads and who is led are; the next in the subgroup are only listened to
    said: HostSummary = field(default_factory=lambda: HostSummary((), 0))
    met: bool = False
    closed: bool = False
    vouched: bool = False  # its process has shown that it runs since it spoke last
    age_s: float = 0.0  # of what it said last
    unseen_s: float = 0.0  # since any sign of life
    silent_s: float = 0.0  # the part of that in which the network is known to have passed
    unproved_s: float = 0.0  # since that was known last
    stall_s: float = 0.0  # the longest time in which it was not
    since_sent_s: float = PERIOD_S

    def revive(self) -> None:
        """Note that it gave a sign of life."""
        self.unseen_s = self.silent_s = self.unproved_s = self.stall_s = 0.0

    def count(self, elapsed_s: float, passes: bool, lapse_s: float) -> None:
        """Count its silence on; see [A stall is not a death]."""
        self.unseen_s += elapsed_s
        self.unproved_s += elapsed_s
        if not passes:
            return
        if self.unproved_s < lapse_s:  # no more than the time between two messages
            self.silent_s += self.unproved_s
        else:
            self.silent_s, self.stall_s = 0.0, max(self.stall_s, self.unproved_s)
        self.unproved_s = 0.0

    @property
    def left(self) -> bool:
        """True if it said that it takes part no more."""
        return bool(self.said.notable) and self.said.notable[0].state.phase >= Phase.FAILED


class Speaker:
    """One host's state; see above."""

    def __init__(self, tree: ControlTree, rank: int, size: int, dead_after: float) -> None:
        self._rank = rank
        self._size = size
        self._dead_after = dead_after
        self._lapse_s = min(_LAPSE_S, 0.75 * dead_after)
        self._neighbours: dict[int, _Neighbour] = {}
        for subgroup in tree.climb(rank):
            if subgroup.level == 0:
                continue
            leader, others = subgroup.leader, subgroup.members[1:]
            told = others[1:] if subgroup.listens else others  # who listens is below the first of them already
            if leader == rank:
                self._neighbours |= {each: _Neighbour(each, judged=True) for each in told}
                continue
            if rank in told:
                self._neighbours[leader] = _Neighbour(leader, judged=True)
            self._neighbours |= {each: _Neighbour(each, judged=False) for each in _beside(rank, others)}
        self._judged = [each for each in self._neighbours.values() if each.judged]
        self._mine: tuple[NotableRank, ...] = ()
        self._my_alarms: tuple[object, ...] = ()
        self._news: set[int] = set()  # from whom there is some
        self._found: tuple[object, ...] = ()  # who is gone, by our own judgement

    @property
    def neighbours(self) -> dict[int, bool]:
        """Ranks with whom this speaker talks, and whether it watches over them."""
        return {each.rank: each.judged for each in self._neighbours.values()}

    @property
    def complete(self) -> bool:
        """True if every rank of the group is spoken for."""
        return len(self._mine) + sum(each.said.num_ranks for each in self._judged) == self._size

    @property
    def quiet(self) -> bool:
        """True if nobody is heard who should be: then the kernel may know more, see `passes`."""
        there = self._there()
        return bool(there) and all(each.unseen_s >= _OVERDUE_S for each in there)

    # What comes in

    def heard(self, neighbour: int, text: bytes) -> None:
        """A neighbour has spoken; what is no message of ours changes nothing."""
        each = self._neighbours[neighbour]
        said = decode_summary(text, self._size)
        if said is None or said.notable[0].rank != neighbour:
            return
        before = each.said
        each.met, each.vouched, each.age_s, each.said = True, False, 0.0, said
        each.revive()
        if each.judged and (said.alarms != before.alarms or said.num_ranks != before.num_ranks):
            self._news.add(neighbour)

    def vouched(self, neighbour: int) -> None:
        """A neighbour's process runs, and the network passes, though its interpreter says nothing."""
        each = self._neighbours[neighbour]
        each.vouched = True
        each.revive()

    def closed(self, neighbour: int) -> None:
        """The connection to a neighbour has ended, and what had come before it was heard."""
        self._neighbours[neighbour].closed = True

    # What goes out

    def tick(
        self, elapsed_s: float, mine: Sequence[NotableRank] | None = None, passes: bool = False, at_once: bool = False
    ) -> list[tuple[int, bytes]]:
        """The messages that are due after so many seconds awake, by neighbour.

        `mine` is this host as it is now, the speaker first; None: as before. `passes`: nobody is heard, but the
        kernels of all neighbours have acknowledged what was sent since. `at_once`: everybody is told something now.
        """
        if mine is not None:
            self._mine = tuple(mine)
            alarms = tuple(alarm for each in mine if (alarm := each.alarm) is not None)
            if alarms != self._my_alarms:
                self._my_alarms = alarms
                self._news.add(self._rank)
        self._count(elapsed_s, passes)
        found = tuple((each.rank, self._gone(each)) for each in self._judged)
        if found != self._found:
            self._found = found
            self._news.add(self._rank)
        due = []
        for each in self._neighbours.values():
            each.since_sent_s += elapsed_s
            news = each.judged and bool(self._news - {each.rank})
            if not each.closed and (at_once or news or each.since_sent_s >= PERIOD_S):
                each.since_sent_s = 0.0
                due.append(each)
        self._news.clear()
        return self._messages(due) if due else []

    def doubtful(self) -> list[int]:
        """Neighbours whose process should be asked, past its interpreter, whether it runs."""
        there = [each for each in self._judged if each.met and not each.closed]
        return [each.rank for each in there if each.unseen_s >= self._patience_s(each) / 2]

    def summary(self) -> bytes:
        """Return all that this speaker knows, for the other ranks of its host."""
        return encode_summary(self._summary(most_notable([*self._mine, *self._others()])))

    def known(self, silent_after: float = float("inf")) -> list[NotableRank]:
        """The most notable ranks of other hosts; a neighbour unheard of for `silent_after` seconds counts as silent."""
        return most_notable(self._others(silent_after))

    # What is known

    def _there(self) -> list[_Neighbour]:
        return [each for each in self._neighbours.values() if each.met and not each.closed and not each.left]

    def _count(self, elapsed_s: float, passes: bool) -> None:
        fresh = [each for each in self._there() if each.unseen_s + elapsed_s < self._lapse_s]
        for each in self._neighbours.values():
            each.age_s += elapsed_s
            if each.met and not each.closed:
                others = len(fresh) > 1 or (len(fresh) == 1 and fresh[0] is not each)
                each.count(elapsed_s, passes or others, self._lapse_s)

    def _gone(self, each: _Neighbour) -> bool:
        return each.closed or (each.met and each.silent_s >= max(self._patience_s(each), each.stall_s))

    def _patience_s(self, each: _Neighbour) -> float:
        return max(self._dead_after, each.age_s / HELD_SHARE if each.vouched else 0.0)

    def _others(self, silent_after: float = float("inf")) -> list[NotableRank]:
        return [rank for each in self._judged for rank in self._side(each, silent_after)]

    def _side(self, each: _Neighbour, silent_after: float = float("inf")) -> list[NotableRank]:
        """Return what a neighbour said, as far as it holds."""
        if each.age_s < min(self._lapse_s, silent_after) and not each.closed:
            return list(each.said.notable)
        side = [rank._replace(unheard_s=max(rank.unheard_s, each.age_s)) for rank in each.said.notable]
        if side:
            silent = self._gone(each) or (each.age_s >= silent_after and not each.vouched)
            held_s = each.age_s if each.vouched and not silent and each.age_s >= self._dead_after else 0.0
            unheard_s = 0.0 if silent or each.vouched else each.age_s
            side[0] = side[0]._replace(silent=silent, held_s=held_s, unheard_s=unheard_s)
        return side

    def _messages(self, due: list[_Neighbour]) -> list[tuple[int, bytes]]:
        """Return what each is told: of all ranks, the most notable that it did not tell us of itself."""
        own = self._mine[0]
        sides = {each.rank: self._side(each) for each in self._judged}
        origin = {rank.rank: neighbour for neighbour, side in sides.items() for rank in side}
        # Among the first of all there are enough for anybody: no side has more than MOST.
        ranked = most_notable([*self._mine[1:], *(rank for side in sides.values() for rank in side)], 2 * MOST)
        messages = []
        for each in due:
            told = [rank for rank in ranked if origin.get(rank.rank) != each.rank] if each.judged else []
            num_ranks = len(self._mine) + sum(side.said.num_ranks for side in self._judged if side is not each)
            summary = HostSummary((own, *told[: MOST - 1]), num_ranks if each.judged else 1)
            messages.append((each.rank, encode_summary(summary)))
        return messages

    def _summary(self, notable: list[NotableRank]) -> HostSummary:
        num_ranks = len(self._mine) + sum(each.said.num_ranks for each in self._judged)
        return HostSummary(tuple(notable), num_ranks)


def _beside(rank: int, members: Sequence[int]) -> list[int]:
    """The next and the one before in a ring of these."""
    at, count = members.index(rank), len(members)
    return sorted({members[(at + 1) % count], members[at - 1]} - {rank})
