"""The news of ranks of other hosts: the first rank of a host hears it by its links, the rest of it from that one.

host 0   0 ◄─links─► host 1's first rank …
         └── page ──► 1, 2, 3          whether the first one lives its pidfd tells
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from gradsync.algorithms.control_tree import ControlTree
from gradsync.transport.beat_links import BeatLinks, Neighbour, tokens_for
from gradsync.transport.groups import Groups
from gradsync.transport.notable_ranks import HostSummary, NotableRank, decode_summary
from gradsync.transport.sockets import read_sockets
from gradsync.transport.speaker import PERIOD_S, Speaker

_STALE_S = 3 * PERIOD_S  # a note so old: nothing more comes from the first rank of this host
_LAST_WORD_S = 0.5  # for another thread to let go of the links


class OtherHosts(Protocol):
    """The ranks of other hosts, as they are heard here."""

    @property
    def complete(self) -> bool:
        """True if every rank of the group is spoken for by now."""

    def turn(self, elapsed_s: float, mine: Sequence[NotableRank] | None, at_once: bool = False) -> None:
        """Hear what has come, and say what is due after so many seconds awake."""

    def known(self, silent_after: float = float("inf")) -> list[NotableRank]:
        """The most notable ranks, some of this host among them perhaps."""


class HeardByLinks:
    """The news that the first rank of a host hears; its thread that beats takes the turns."""

    def __init__(
        self,
        tree: ControlTree,
        groups: Groups,
        dead_after: float,
        timeout: float,
        leave_note: Callable[[bytes], None],
    ) -> None:
        """`leave_note` shows the rest of this host what is known; for `timeout` seconds a rank may be late."""
        self._speaker = Speaker(tree, groups.rank, groups.size, dead_after)
        watched = self._speaker.neighbours
        found = {
            rank: Neighbour(rank, channel, place, watched[rank])
            for subgroup, channel in reversed(groups.subgroups)  # two that meet twice beat in the lower one
            for place, rank in enumerate(subgroup.members)
            if subgroup.level and rank in watched
        }
        self._links = BeatLinks(list(found.values()), tokens_for(timeout, dead_after))
        self._sockets = groups.link_sockets
        self._leave_note = leave_note
        self._since_note_s = PERIOD_S
        self._acknowledged: int | None = None  # by the neighbours' kernels, when nobody was heard any more
        self._turning = threading.Lock()  # whoever leaves says so from its own thread

    @property
    def complete(self) -> bool:
        return self._speaker.complete

    def turn(self, elapsed_s: float, mine: Sequence[NotableRank] | None, at_once: bool = False) -> None:
        if not self._turning.acquire(timeout=_LAST_WORD_S):
            return
        try:
            self._turn(elapsed_s, mine, at_once)
        finally:
            self._turning.release()

    def known(self, silent_after: float = float("inf")) -> list[NotableRank]:
        with self._turning:
            return self._speaker.known(silent_after)

    def _turn(self, elapsed_s: float, mine: Sequence[NotableRank] | None, at_once: bool) -> None:
        speaker, links = self._speaker, self._links
        gone = links.closed()  # first: what they sent before is heard below
        said = list(links.hear())
        for neighbour, text in said:
            speaker.heard(neighbour, text)
        for neighbour in links.vouched():
            speaker.vouched(neighbour)
        for neighbour in gone:
            speaker.closed(neighbour)
        messages = speaker.tick(elapsed_s, mine, self._network_passes(), at_once)
        links.send(messages, at_once)
        links.ask(speaker.doubtful())
        links.restock()
        self._since_note_s += elapsed_s
        if said or messages or self._since_note_s >= PERIOD_S:
            self._since_note_s = 0.0
            self._leave_note(speaker.summary())

    def _network_passes(self) -> bool:
        """Return whether all that was sent since no one is heard was acknowledged: see [A stall is not a death]."""
        if not self._speaker.quiet:
            self._acknowledged = None
            return False
        readings = read_sockets(self._sockets).values()
        acknowledged = sum(reading.nbytes for reading in readings)
        if self._acknowledged is None:
            self._acknowledged = acknowledged
        return acknowledged > self._acknowledged and not any(reading.in_flight for reading in readings)


class HeardFromSpeaker:
    """The news that the other ranks of a host get from the first one."""

    def __init__(self, read_note: Callable[[], tuple[int, bytes]], size: int) -> None:
        """`read_note` is what the first rank of this host leaves on its page."""
        self._read_note = read_note
        self._size = size
        self._number = 0
        self._age_s = 0.0
        self._summary = HostSummary((), 0)

    @property
    def complete(self) -> bool:
        return self._summary.num_ranks == self._size

    def turn(self, elapsed_s: float, mine: Sequence[NotableRank] | None, at_once: bool = False) -> None:
        self._age_s += elapsed_s
        self._look()

    def known(self, silent_after: float = float("inf")) -> list[NotableRank]:
        self._look()
        age_s = self._age_s if self._age_s >= _STALE_S else 0.0
        return [each._replace(unheard_s=max(each.unheard_s, age_s)) for each in self._summary.notable]

    def _look(self) -> None:
        number, text = self._read_note()
        if number != self._number:
            self._number, self._age_s = number, 0.0
            self._summary = decode_summary(text, self._size) or self._summary
