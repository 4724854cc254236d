"""The bytes our connections carried between two looks, and to whom: which link is slow shows in no collective."""

from __future__ import annotations

from collections.abc import Collection

from gradsync.agreement.documents import share
from gradsync.trace.lines import SocketLine, SocketLines
from gradsync.transport.lane import Lane
from gradsync.transport.sockets import SocketReading, read_sockets

_ENOUGH_NBYTES = 1 << 16  # less says nothing of a link


class SocketUse:
    """Connections of one rank."""

    def __init__(self, lane: Lane, sockets: Collection[tuple[int, str]]) -> None:
        """`sockets` may still grow."""
        self._lane = lane
        self._sockets = sockets
        self._last: dict[str, SocketReading] = read_sockets(sockets)
        self._peers: dict[tuple[str, int], int] = {}

    def know_peers(self) -> None:
        """Learn whose the other ends are; every rank calls this at once."""
        readings = read_sockets(self._sockets)
        mine = [list(reading.mine) for reading in readings.values()]
        for rank, document in enumerate(share(self._lane, {"ends": mine})):
            for address, port in document["ends"]:
                self._peers[(str(address), int(port))] = self._lane.groups.ranks[rank]

    def since_last(self, step: int) -> SocketLines | None:
        """Return what each carried since the last call; None if nothing much."""
        if len(self._lane.hosts) == 1:
            return None  # what goes through loopback says nothing of a link
        now = read_sockets(self._sockets)
        sockets = [self._socket_line(reading, self._last.get(name)) for name, reading in now.items()]
        self._last = now
        telling = [line for line in sockets if line.nbytes >= _ENOUGH_NBYTES]
        return SocketLines(step, telling) if telling else None

    def _socket_line(self, now: SocketReading, before: SocketReading | None) -> SocketLine:
        nbytes, busy_s, retransmits = (
            (0, 0.0, 0) if before is None else (before.nbytes, before.busy_s, before.retransmits)
        )
        peer = self._peers.get((now.theirs.address, now.theirs.port))
        return SocketLine(
            peer, now.theirs.address, now.nbytes - nbytes, now.busy_s - busy_s, now.rtt_s, now.retransmits - retransmits
        )
