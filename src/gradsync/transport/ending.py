"""The end of a lane that nobody closed: what is still under way is ended, so that the process can exit."""

from __future__ import annotations

import os
import time
from collections import deque

from gradsync.transport.courier import Courier
from gradsync.transport.groups import Groups
from gradsync.transport.liveness import Liveness
from gradsync.transport.team import Team
from gradsync.transport.tickets import Ticket
from gradsync.transport.wires import cut

_GRACE_S = 1.0
# A thread of gloo that has just told of a failure still lets go of Python's objects. It would end the process with a
# crash if the interpreter were gone by then.
_LEAVING_S = 0.02


def abandon(
    under_way: deque[Ticket],
    groups: Groups,
    house: list[Team],
    couriers: list[Courier],
    liveness: Liveness,
    pid: int,
) -> None:
    """End what is still under way."""
    # A forked child has the same sockets, and ends without touching them.
    if os.getpid() != pid:
        return
    liveness.orphan()
    for team in house:
        team.abort()
    if not all(ticket.landed(0) for ticket in list(under_way)):
        cut(groups.wires)
        for ticket in list(under_way):
            ticket.landed(_GRACE_S)
    if not all(ticket.succeeded for ticket in list(under_way)):
        time.sleep(_LEAVING_S)
    for courier in couriers:
        courier.close(_GRACE_S)
    # Only when nobody can be in it: its memory goes away.
    for team in house:
        team.close()
