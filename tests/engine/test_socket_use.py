"""What is told of a socket is what it did since it was read last."""

from __future__ import annotations

from typing import cast

from gradsync.engine.socket_use import SocketUse
from gradsync.transport.lane import Lane
from gradsync.transport.sockets import SocketEnd, SocketReading

ENDS = SocketEnd("10.0.0.1", 4000), SocketEnd("10.0.0.2", 5000)


def test_it_is_the_difference_of_two_readings() -> None:
    links = SocketUse(cast(Lane, None), [])
    first, second = SocketReading(*ENDS, 1000, 2.0, 0.1, 3), SocketReading(*ENDS, 5000, 2.5, 0.2, 7)
    told = links._socket_line(second, first)
    assert (told.nbytes, told.busy_s, told.rtt_s, told.retransmits) == (4000, 0.5, 0.2, 4)
    told = links._socket_line(second, None)
    assert (told.nbytes, told.busy_s, told.rtt_s, told.retransmits) == (5000, 2.5, 0.2, 7), "all, of a new one"
