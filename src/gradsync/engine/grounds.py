"""What `gs.auto()` chose from: rank 0 keeps it beside the trace, for `gradsync plan --check`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from gradsync.links import Cluster
from gradsync.plan import Plan
from gradsync.planner.profile import ModelProfile


class Grounds(NamedTuple):
    """What a plan was chosen from."""

    cluster: Cluster
    profile: ModelProfile

    def save(self, folder: Path, plan: Plan) -> None:
        """cluster.toml, profile.toml and plan.toml; a disk that fails ends no training."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.cluster.save(folder / "cluster.toml")
            self.profile.save(folder / "profile.toml")
            plan.save(folder / "plan.toml")
        except OSError as error:
            warnings.warn(
                f"gs.auto(save={str(folder)!r}) could not be written, and training goes on: {error}", stacklevel=2
            )
