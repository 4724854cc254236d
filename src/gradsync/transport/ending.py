"""The end of a lane that nobody closed.

the process exits       `abandon`: what is still under way is ended, for the interpreter goes
the model was dropped   `let_go`: first what is under way comes to its end, and whoever is a step behind comes as far
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass

from gradsync.transport.clock import Awake
from gradsync.transport.courier import Courier
from gradsync.transport.groups import Groups
from gradsync.transport.liveness import Liveness
from gradsync.transport.page import Phase
from gradsync.transport.team import Team
from gradsync.transport.tickets import Ticket
from gradsync.transport.wires import cut


@dataclass
class Estate:
    """What a lane leaves."""

    under_way: deque[Ticket]
    groups: Groups
    house: list[Team]
    couriers: list[Courier]
    liveness: Liveness
    pid: int  # a forked child has the same sockets, and ends without touching them
    handed_over: bool = False  # to the liveness thread

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way."""
        return all(ticket.landed(0) for ticket in list(self.under_way))

    def wind_up(self) -> None:
        """Nccl's groups stay: whether something of theirs is under way, only a stream knows."""
        _end(self)
        if self.groups.on_host and self.at_rest:
            self.groups.close()


_GRACE_S = 1.0
# A thread of gloo that has just told of a failure still lets go of Python's objects. It would end the process with a
# crash if the interpreter were gone by then.
_LEAVING_S = 0.02


def let_go(estate: Estate, timeout: float) -> None:
    """The garbage collector found the lane: have the liveness thread see to its end, instead of `abandon` now.

    Not here: gloo's own thread may be the one that collects, and gloo's end waits for it.
    """
    alive = estate.groups.size > 1 and estate.liveness.state.phase < Phase.FAILED
    if os.getpid() == estate.pid and alive:
        estate.handed_over = True
        bound = Awake(timeout)
        liveness = estate.liveness
        liveness.orphan(lambda: bound.over() or (estate.at_rest and not liveness.is_ahead()), estate.wind_up)


def abandon(estate: Estate) -> None:
    """End what is still under way."""
    if os.getpid() == estate.pid and not estate.handed_over:
        _end(estate)


def _end(estate: Estate) -> None:
    estate.liveness.orphan()
    for team in estate.house:
        team.abort()
    if not estate.at_rest:
        cut(estate.groups.wires)
        for ticket in list(estate.under_way):
            ticket.landed(_GRACE_S)
    if not all(ticket.succeeded for ticket in list(estate.under_way)):
        time.sleep(_LEAVING_S)
    for courier in estate.couriers:
        courier.close(_GRACE_S)
    # Only when nobody can be in it: its memory goes away.
    for team in estate.house:
        team.close()
