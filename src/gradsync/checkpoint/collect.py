"""Takes the state of a running GradSync, and gives it one to continue from."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping

import torch

from gradsync.agreement.calls import Call
from gradsync.checkpoint.format import (
    OwnState,
    SavedRunState,
    SharedState,
    State,
    add_up,
    flatten,
    flatten_part,
    flatten_shared,
    shorten,
)
from gradsync.checkpoint.redistribute import changes, gather, receive
from gradsync.compress import toml
from gradsync.engine.loop import StepLoop
from gradsync.exchange.means import level
from gradsync.exchange.residuals import KeptState
from gradsync.pace.contract import OpenWindow, SavedPace
from gradsync.plan import paces


class StateCollector:
    """Knows which parts of the engine have something to keep."""

    def __init__(self, steps: StepLoop) -> None:
        self._steps = steps
        self._shapes = {entry.name: tuple(entry.param.shape) for entry in steps.synchronization.entries}

    # `gs.auto()` may have changed the plan since: it is asked for each time

    @property
    def _kind(self) -> str:
        kind: str = paces.canonical(self._steps.plan.pace)["kind"]
        return kind

    @property
    def _recipe(self) -> str:
        plan = self._steps.plan
        return shorten(json.dumps({"combine": plan.combine, "compress": toml.canonical(plan.compress)}))

    # Taking

    def state(self) -> State:
        """Return this rank's state. A batch that raised is finished first, as by others; not while it is handled."""
        if sys.exception() is None and not self._steps.failed:
            self._steps.dropped_batches.drop_raised_before_saving()
        return flatten(self._saved())

    def state_of_all(self) -> State:
        """Every rank's state, on rank 0."""
        self._steps.meet(Call.GATHER)
        rank, saved = self._steps.lane.groups.rank, self._saved()
        with self._steps.failing():
            return gather(
                self._steps.lane, flatten_shared(saved), flatten_part(rank, saved.parts[rank], saved.shared.step)
            )

    def _saved(self) -> SavedRunState:
        pace, held = self._steps.pace.state(), self._steps.pace.open_window()
        kept = self._steps.synchronization.sender.kept()  # after the pace has waited for what is under way
        shared = SharedState(
            step=self._steps.lane.step,
            world_size=self._steps.lane.groups.size,
            unit=self._steps.synchronization.weighting.unit,
            backwards=held.backwards,
            recipe=self._recipe,
            arrangement=self._steps.synchronization.bucket_order.arrangement(),
        )
        by_hand = self._steps.unsynchronized > 0 and not held.backwards  # the user's own, and not in the state
        weighed = None if by_hand else self._steps.synchronization.weighting.state()
        num_hidden = len(held.hidden) + held.num_shown
        aborted = self._steps.dropped_batches.spoiled if held.backwards else 0
        part = OwnState(kept.residuals, held.hidden, num_hidden, weighed, pace.own, int(aborted))
        mark = {f"{self._kind}.apart": torch.tensor(int(self._steps.pace.replicas_differ), device="cpu")}
        stored = pace.shared if self._steps.pace.engine_averages else pace.shared | mark
        return SavedRunState(shared, kept.factors, {self._steps.lane.groups.rank: part}, stored)

    # Giving

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved state. Nothing has changed here before all ranks have found that they can."""
        self._steps.meet(Call.LOAD)
        keeps = len(self._steps.synchronization.sender.kept().residuals)
        taken, redistribution = receive(self._steps.lane, state, self._shapes, keeps, self._steps.failing)
        with self._steps.failing():
            window_continues = redistribution.whole and self._steps.pace.has_room_for(taken.shared.backwards)
            self._continue(taken, window_continues)
            self._load_pace(taken, redistribution.whole)
            self._steps.step_counts.begin_anew()
        if self._steps.lane.groups.rank == 0:  # all ranks see the same
            for change in (*changes(taken, redistribution, self._recipe), *self._changes(taken, window_continues)):
                warnings.warn(f"{self._steps.lane.place()} {change}", stacklevel=3)

    def _load_pace(self, taken: SavedRunState, whole: bool) -> None:
        self._steps.pace.load(SavedPace(taken.pace, _own(taken, self._steps.lane.groups.rank) if whole else {}))
        others = [key for key in taken.pace if key.endswith(".apart") and key != f"{self._kind}.apart"]
        if any(bool(taken.pace[key]) for key in others) and not self._steps.pace.replicas_differ:
            # Every rank may have loaded a model of its own, and this pace keeps them equal.
            level(
                self._steps.lane,
                self._steps.synchronization.exact,
                [entry.param for entry in self._steps.synchronization.entries],
            )

    def _continue(self, taken: SavedRunState, window_continues: bool) -> None:
        shared, parts = taken.shared, list(taken.parts.values())
        self._steps.synchronization.sender.replace(KeptState(add_up(parts), taken.factors))
        self._steps.synchronization.bucket_order.arrange(shared.arrangement)
        held = OpenWindow(shared.backwards, parts[0].hidden) if window_continues else OpenWindow(0, {})
        self._steps.synchronization.continue_window(held.backwards, set(held.hidden))
        self._steps.pace.resume_window(held)
        self._steps.synchronization.weighting.continue_at(shared.unit, parts[0].weight if window_continues else None)
        self._steps.dropped_batches.step_ends(spoiled=parts[0].aborted if window_continues else 0)
        self._steps.dropped_batches.retries.another_batch()
        self._steps.lane.session.continue_at(shared.step)

    def _changes(self, taken: SavedRunState, window_continues: bool) -> Iterator[str]:
        """Yield what else is not as it was."""
        shared, stored = taken.shared, {key.partition(".")[0] for key in taken.pace}
        if stored - {self._kind}:
            yield (
                f"this state was saved with pace {min(stored)}, and this plan's is {self._kind}: what that one kept is "
                "lost (averages under way, global parameters and their momentum), and this one begins anew, from the "
                "mean of the ranks' parameters where they differ"
            )
        if shared.backwards and not window_continues:
            yield (
                f"this state was saved inside a window of accumulate(k), {shared.backwards} backward calls after its "
                "beginning, and their gradients are lost: the window begins anew. To go on in it takes the same pace, "
                "as many ranks, every rank's state, and a saver that keeps hidden gradients "
                "(torch.distributed.checkpoint does not: with it, save while sync.mid_window is False). What a "
                "backward that raised, or one under no_sync(), has begun to add to cannot be saved"
            )
        waiting = self._steps.synchronization.sender.waiting
        if waiting and shared.arrangement.learned:
            yield (
                f"{len(waiting)} parameters with a residual, {waiting[0]} among them, are not compressed here (one "
                "rank alone compresses nothing): what was not sent yet stays in state_dict() until they are"
            )


def _own(taken: SavedRunState, rank: int) -> State:
    """Return what the pace stored for this rank alone."""
    return taken.parts[rank].pace if rank in taken.parts else {}
