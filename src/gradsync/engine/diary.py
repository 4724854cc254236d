"""What `gs.auto(save=folder)` writes: what the choice was made from, and the steps that followed it.

    cluster.toml, profile.toml, plan.toml       rank 0
    rank-0.jsonl, rank-1.jsonl …                every rank: a header, then a line per step; docs/auto.md

All of it belongs to one choice: with the next one, everything is written anew.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import IO, NamedTuple

from gradsync.links import Cluster
from gradsync.plan import Plan
from gradsync.planner.profile import ModelProfile
from gradsync.trace import Recorder

FORMAT = 1
_MOST_STEPS = 1000  # of one choice
_AT_ONCE = 20  # steps, once there are as many


class Grounds(NamedTuple):
    """What a plan was chosen from."""

    cluster: Cluster
    profile: ModelProfile


class Diary:
    """One rank's part of the folder; a disk that fails ends the diary, not the training."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._file: IO[str] | None = None
        self._after = 0  # the step after which those come that are to be written
        self._seen = 0

    def begin(self, plan: Plan, predicted_s: float, grounds: Grounds | None, step: int) -> None:
        """A plan was chosen, and `step` is the first that runs with it; `grounds` on rank 0."""
        self.close()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if grounds is not None:
                grounds.cluster.save(self._folder / "cluster.toml")
                grounds.profile.save(self._folder / "profile.toml")
                plan.save(self._folder / "plan.toml")
            self._file = open(self._folder / f"rank-{self._rank}.jsonl", "w", encoding="utf-8")  # noqa: SIM115
            header = {"format": FORMAT, "rank": self._rank, "world_size": self._world_size}
            self._write(header | {"predicted_step_s": predicted_s})
        except OSError as error:
            self._give_up(error)
        # The first step holds the switch itself.
        self._after, self._seen = step, 0

    def step(self, recorder: Recorder, last: bool = False) -> None:
        """One more synchronization, or the `last` one: write what is known by now."""
        self._seen += 1
        if self._file is None or not (last or self._seen < _AT_ONCE or self._seen % _AT_ONCE == 0):
            return
        for record in recorder.records():
            if record.step > self._after and self._seen <= _MOST_STEPS:
                if record.device is not None:
                    break  # its times are not known yet, nor those of later ones
                self._after = record.step
                self._write({"step": record.step, "step_s": record.step_s, "exposed_s": record.exposed_s})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, float | int]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        warnings.warn(f"gs.auto(save={str(self._folder)!r}) stops writing, and training goes on: {error}", stacklevel=2)
