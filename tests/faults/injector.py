"""Faults at a named point of a step, keyed by (rank, step, bucket), never by time.

    before_forward │ in_forward │ in_backward │ after_bucket │ before_header │ before_wait │ waiting │ after_sync
    │ in_step

The loop calls `reach` for what lies in the loop; the points inside backward are reached by hooks, and as a listener
to the synchronization.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from nursery import Journal

from gradsync.agreement.header import Head
from gradsync.engine.handle import GradSync
from gradsync.transport.heartbeat import Phase
from gradsync.transport.lane import Lane

_HELD_US = 5_000_000  # much longer than the guard's dead_after

POINTS = (
    "before_forward",
    "in_forward",
    "in_backward",
    "after_bucket",
    "before_header",
    "before_wait",
    "waiting",
    "after_sync",
    "in_step",
)


class Injected(Exception):
    """The fault that raises."""


class Fault(NamedTuple):
    """What happens to whom, and where."""

    rank: int
    point: str
    act: str  # kill, stop, interrupt, raise, stall, hold (keep the interpreter), pause (until the test says go)
    step: int = 2
    bucket: int = 1
    last: int = -1  # the rank that goes on in this step only when every other process has ended


class Injector:
    """Waits in every rank of a scene; acts in the one that the fault names."""

    def __init__(self, fault: Fault, rank: int, journal: Journal) -> None:
        self.step = 0  # told by the loop
        self.fault = fault
        self._rank = rank
        self._journal = journal

    def install(self, sync: GradSync, model: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        """Put the hooks on, after attach."""
        listeners = sync._steps.listeners
        if self.fault.last == self._rank:
            model[0].register_forward_hook(lambda *_: self._be_last(sync))
        model[0].register_forward_hook(lambda *_: self.reach("in_forward"))
        model.register_forward_hook(self._after_forward)
        optimizer.register_step_post_hook(lambda *_: self.reach("in_step"))
        listeners.add(
            left=lambda bucket, pending: self.reach("after_bucket", bucket.index),
            announce=self._before_header,
            header_waits=lambda: self.reach("before_wait"),
        )
        if self.fault.point == "waiting" and self._is_next_to_the_victim(sync):
            listeners.add(first=True, announce=lambda head: self._strike(sync, head))

    def reach(self, point: str, bucket: int | None = None) -> None:
        """This rank is at `point`; if the fault is here, it happens."""
        fault = self.fault
        if (self._rank, self.step, point) == (fault.rank, fault.step, fault.point) and bucket in (None, fault.bucket):
            self._journal.write("act")
            self._act()

    def _act(self) -> None:
        if self.fault.act == "raise":
            raise Injected("injected")
        if self.fault.act == "stall":
            self.stall()
        if self.fault.act == "hold":
            ctypes.PyDLL(None).usleep(_HELD_US)  # a C function that does not release the interpreter
            return
        if self.fault.act == "pause":
            until(lambda: bool(self._journal.told("go")))
            return
        os.kill(os.getpid(), _SIGNALS[self.fault.act])

    def stall(self) -> None:
        """Stay alive and come no further."""
        threading.Event().wait()

    def _after_forward(self, _: torch.nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: self.reach("in_backward"))

    def _before_header(self, head: Head) -> Head:
        self.reach("before_header")
        return head

    # A rank that waits cannot act; its neighbour, for whose header it waits, acts on it.

    def _is_next_to_the_victim(self, sync: GradSync) -> bool:
        return self._rank == (self.fault.rank + 1) % sync._lane.groups.size

    def _strike(self, sync: GradSync, head: Head) -> Head:
        liveness = sync._lane.liveness
        if self.step == self.fault.step:
            waiting = (self.fault.step, Phase.WAITING)
            until(lambda: liveness.peer_views()[self.fault.rank].state[1:3] == waiting)
            pid = liveness.pid(self.fault.rank)
            assert pid is not None
            self._journal.write("act")
            os.kill(pid, _SIGNALS[self.fault.act])
        return head

    def _be_last(self, sync: GradSync) -> None:
        if self.step == self.fault.step:
            until(lambda: all(view.dead for view in sync._lane.liveness.peer_views().values()))


class SumInjector(Injector):
    """For sums in shared memory.

        before_post │ posted │ adding

    A rank that has posted waits for the others: its neighbour acts on it, and comes only then. A rank that adds is
    in C: a thread of its own acts as soon as the first elements have become sums.
    """

    def install(self, lane: Lane) -> None:  # type: ignore[override]
        team = lane.team
        assert team is not None
        neighbour = self._rank == (self.fault.rank + 1) % lane.groups.size

        def first(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self.reach("before_post")
                if self.fault.point == "posted" and neighbour and self.step == self.fault.step:
                    self._strike_now(lane)
                return function(*args)

            return call

        team.submit = first(team.submit)  # type: ignore[method-assign]
        team.advance = first(team.advance)  # type: ignore[method-assign]

    def watch(self, flat: torch.Tensor) -> None:
        """Before a sum of `flat`: act in the middle of it, if the fault is there."""
        if (self._rank, self.step, "adding") == (self.fault.rank, self.fault.step, self.fault.point):
            begins = flat.numel() // 4 * self._rank  # one's own part comes first; when staged, all do
            before = flat[begins].item()

            def strike() -> None:
                until(lambda: flat[begins].item() != before, pause_s=0)
                self.reach("adding")

            threading.Thread(target=strike, daemon=True).start()

    def _strike_now(self, lane: Lane) -> None:
        self.step = -1  # once
        waiting = (self.fault.step, Phase.WAITING)
        until(lambda: lane.liveness.peer_views()[self.fault.rank].state[1:3] == waiting)
        pid = lane.liveness.pid(self.fault.rank)
        assert pid is not None
        self._journal.write("act")
        os.kill(pid, _SIGNALS[self.fault.act])


def until(condition: Callable[[], bool], pause_s: float = 0.01) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "what the injector waits for did not happen"
        time.sleep(pause_s)


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
