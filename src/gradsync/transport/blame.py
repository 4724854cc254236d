"""A judgement of who is to blame, as pure functions of what was seen.

Blame goes to who is dead, silent or late, never to who reported. A rank that gives up writes whom it holds
responsible, and the others take that over instead of blaming it when it exits:

    rank 2   ✕ killed
    rank 0     gave up: "rank 2"  ✕ exits
    rank 1                            sees 0 and 2 dead, and names only rank 2

Who may have stopped after giving us all we wait for is excused for a moment: it gave up or left, or it is
already past this step. Only if that moment brings neither the data nor another culprit is it blamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gradsync.errors import JOIN
from gradsync.transport.heartbeat import Phase, RankState

_GAVE_UP = (Phase.FAILED, Phase.LOST_PEER)


class PeerView(NamedTuple):
    """One peer, as it was seen just now."""

    state: RankState
    dead: bool
    silent: bool
    held_s: float = 0.0  # how long its interpreter was not heard of though its process runs
    unheard_s: float = 0.0  # how long nothing was heard of it, and nothing proves that this lies with it

    @property
    def gone(self) -> bool:
        return self.dead or self.silent

    @property
    def stopped(self) -> bool:
        """True if it takes part no more: gone, left, or gave up."""
        return self.gone or self.state.phase == Phase.LEFT or self.state.phase in _GAVE_UP

    def excused(self, step: int) -> bool:
        """Return whether it may have stopped for a reason that lies with others, or after this step was done."""
        return self.state.phase == Phase.LEFT or self.state.phase in _GAVE_UP or self.state.step > step


PeerViews = Mapping[int, PeerView]


def lost(views: PeerViews, step: int) -> list[int]:
    """Ranks that died or fell silent in the midst of this step, or before it."""
    return [rank for rank, view in views.items() if view.gone and not view.excused(step)]


def stopped(views: PeerViews) -> list[int]:
    """Ranks that take part no more."""
    return [rank for rank, view in views.items() if view.stopped]


def late(views: PeerViews, step: int) -> list[int]:
    """Ranks that do not wait in this step as we do, and those that stopped; of whom nothing is heard nobody knows."""
    here = (step, Phase.WAITING)
    known = {rank: view.state for rank, view in views.items() if not view.unheard_s}
    return [rank for rank, state in known.items() if (state.step, state.phase) != here and state.step <= step]


def blame(views: PeerViews, suspects: Iterable[int], step: int, size: int | None = None) -> tuple[list[int], list[int]]:
    """Follow what the suspects report: the guilty, and those who are excused unless nobody is guilty.

    The guilty may include this rank itself, which has no view of its own, and of a group of `size` ranks others too
    that only the suspects can see.
    """
    size = len(views) + 1 if size is None else size
    guilty, excused, seen = set[int](), set[int](), set[int]()
    open_ = list(suspects)
    while open_:
        rank = open_.pop()
        if rank in seen:
            continue
        seen.add(rank)
        view = views.get(rank)
        if view is not None and view.state.phase in _GAVE_UP and view.state.culprits:
            open_ += [culprit for culprit in view.state.culprits if 0 <= culprit < size]
        elif view is not None and view.excused(step):
            excused.add(rank)
        else:
            guilty.add(rank)
    return sorted(guilty), sorted(excused)


def is_lost(views: PeerViews, rank: int) -> bool:
    """Return whether the rank will never come, as opposed to: it is late."""
    view = views.get(rank)
    reported = any(s.state.phase == Phase.LOST_PEER and rank in s.state.culprits for s in views.values())
    return reported or (view is not None and view.stopped)


def unheard(views: PeerViews) -> tuple[list[int], float]:
    """Ranks of which nothing is heard, and for how long, where nothing proves that they are gone."""
    silent = {rank: view.unheard_s for rank, view in views.items() if view.unheard_s and not view.stopped}
    return list(silent), max(silent.values(), default=0.0)


def way_out(views: PeerViews, ranks: Iterable[int]) -> str:
    """Say what to do when these ranks take part no more: who ended in good order has no batches left, most likely."""
    if all(rank in views and views[rank].state.phase == Phase.LEFT for rank in ranks):
        return f"It ended by itself: {JOIN}. Otherwise see its own log; a restart alone would end at the same place"
    return (
        "Exit with an error and let the launcher restart all ranks (torchrun --max-restarts) from the last checkpoint"
    )


def describe_peer(view: PeerView, name: str, pid: int | None, lost: bool) -> str:
    """Say what became of one rank, as part of a sentence."""
    state = view.state
    who = f"{name} (pid {pid})" if pid is not None else name
    if state.phase in _GAVE_UP:
        return f"{who} failed in step {state.step}"
    if state.phase == Phase.LEFT:
        # Whether its process is gone already depends on who looks when: the word must not.
        return f"{who} left in step {state.step}"
    if view.dead:
        return f"{who} died in step {state.step}"
    if lost:
        return f"{who} gives no sign of life, last seen {state.phase} in step {state.step}"
    if view.held_s:
        return (
            f"{who} is alive but its interpreter has been held for {view.held_s:.0f} s (by a C function that does not "
            f"release it), last seen {state.phase} in step {state.step}"
        )
    if view.unheard_s:
        return f"nothing was heard of {who} for {view.unheard_s:.0f} s, last seen {state.phase} in step {state.step}"
    return f"{who} is alive but still {state.phase} in step {state.step}"
