"""The end of a lane that nobody closed.

the process exits       `abandon`: what is still under way is ended, for the interpreter goes
the model was dropped   `end_later`: first what is under way comes to its end, and whoever is a step behind comes as far
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass

from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.groups import Groups
from gradsync.transport.heartbeat import Phase
from gradsync.transport.lane_thread import LaneThread
from gradsync.transport.liveness import Liveness
from gradsync.transport.pending import Pending
from gradsync.transport.shared_memory import Team
from gradsync.transport.sockets import cut


@dataclass
class AbandonedLane:
    """The groups, threads and operations that a lane leaves behind."""

    under_way: deque[Pending]
    groups: Groups
    within_hosts: list[Team]
    lane_threads: list[LaneThread]
    liveness: Liveness
    pid: int  # a forked child has the same sockets, and ends without touching them
    handed_over: bool = False  # to the liveness thread

    @property
    def at_rest(self) -> bool:
        """True if nothing is under way."""
        return all(pending.landed(0) for pending in list(self.under_way))

    def wind_up(self) -> None:
        """End what is under way, and close groups at rest; NCCL's only end all together, so they are given up."""
        _end(self)
        self.groups.abort()
        if self.at_rest:
            self.groups.close()


_GRACE_S = 1.0
_ABORT_S = 1.8  # NCCL takes about one
# A thread of gloo that has just told of a failure still lets go of Python's objects. It would end the process with a
# crash if the interpreter were gone by then.
_LEAVING_S = 0.02


def end_later(abandoned: AbandonedLane, timeout: float) -> None:
    """The garbage collector found the lane: have the liveness thread see to its end, instead of `abandon` now.

    Not here: gloo's own thread may be the one that collects, and gloo's end waits for it.
    """
    alive = abandoned.groups.size > 1 and abandoned.liveness.state.phase < Phase.FAILED
    if os.getpid() == abandoned.pid and alive:
        abandoned.handed_over = True
        bound = AwakeClock(timeout)
        liveness = abandoned.liveness
        liveness.orphan(lambda: bound.over() or (abandoned.at_rest and not liveness.is_ahead()), abandoned.wind_up)


def abandon(abandoned: AbandonedLane) -> None:
    """End what is still under way."""
    if os.getpid() == abandoned.pid and not abandoned.handed_over:
        _end(abandoned)


def _end(abandoned: AbandonedLane) -> None:
    if abandoned.liveness.state.phase < Phase.FAILED:  # the others may need what this rank's GPU still sends
        for pending in list(abandoned.under_way):
            if not pending.on_host:
                pending.landed(_GRACE_S)
    abandoned.liveness.orphan()
    for team in abandoned.within_hosts:
        team.abort()
    if not abandoned.at_rest:
        abandoned.groups.abort()
        cut(abandoned.groups.sockets)
        for pending in list(abandoned.under_way):
            pending.landed(_GRACE_S)
    if not all(pending.succeeded for pending in list(abandoned.under_way)):
        time.sleep(_LEAVING_S)
    for lane_thread in abandoned.lane_threads:
        lane_thread.close(_GRACE_S)
    for channel in abandoned.groups.on_streams:
        channel.aborted(_ABORT_S)
    # Only when nobody can be in it: its memory goes away.
    for team in abandoned.within_hosts:
        team.close()
