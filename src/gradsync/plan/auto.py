"""`auto`: let gradsync choose the plan, as data. What it does with it is in the engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gradsync.cluster import Cluster
from gradsync.plan.sync_plan import Plan

Allowed = Literal["exact", "16-bit", "lossy"]

PROFILING = Plan(overlap="none")
"""The plan of the first steps: exact, and computation and communication apart, so that each can be timed."""


@dataclass(frozen=True)
class Auto:
    """Measure, choose, switch; made by `auto`."""

    allow: Allowed = "16-bit"
    cluster: Cluster | None = None
    steps: int = 5
    recheck_every: int = 200
    save: Path | None = None

    def __post_init__(self) -> None:
        if self.allow not in get_args(Allowed):
            hint = " (other paces change what is learned: choose one in gs.Plan)" if str(self.allow) == "all" else ""
            raise ValueError(f'auto: allow must be "exact", "16-bit" or "lossy", got {self.allow!r}{hint}')
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise TypeError(f"auto: cluster must be a gs.Cluster or the path of a cluster.toml, got {self.cluster!r}")
        for name in ("steps", "recheck_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"auto: {name} must be a whole number of at least 1, got {value!r}")

    def canonical(self) -> dict[str, Any]:
        """Return what must be the same on every rank; each may save elsewhere."""
        cluster = "probed"
        if self.cluster is not None:
            digest = hashlib.sha256(repr(self.cluster).encode()).hexdigest()[:12]
            cluster = f"{self.cluster.name or 'given'} ({digest})"
        return {"allow": self.allow, "cluster": cluster, "steps": self.steps, "recheck_every": self.recheck_every}


def auto(
    allow: Allowed = "16-bit",
    cluster: Cluster | str | Path | None = None,
    steps: int = 5,
    recheck_every: int = 200,
    save: str | Path | None = None,
) -> Auto:
    """Take the place of a plan: probe the links, time the first steps, choose a plan, say why, and switch to it.

    Args:
        allow: What may be chosen: "exact", "16-bit" (that, and gradients in bf16), or "lossy" (also int8, int4, sign,
            top-k, PowerSGD). Never another pace.
        cluster: What the links can do, or the path of the cluster.toml that `gradsync probe` wrote; None: probe
            briefly at attach.
        steps: How many steps are timed before the choice.
        recheck_every: After so many synchronizations the measured step is compared with the predicted one.
        save: A folder for cluster.toml, profile.toml, plan.toml and a trace of the steps; see docs/auto.md.

    >>> auto(allow="exact").canonical()["allow"]
    'exact'
    """
    if isinstance(cluster, str | Path):
        try:
            cluster = Cluster.load(cluster)
        except OSError as error:
            raise ValueError(f"auto: {cluster} cannot be read ({error.strerror}); gradsync probe writes one") from None
    if save is not None and not isinstance(save, str | Path):
        raise TypeError(f"auto: save must be the path of a folder, got {save!r}")
    return Auto(allow, cluster, steps, recheck_every, None if save is None else Path(save))
