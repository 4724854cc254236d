"""What gradsync's planner says of an arm, from the probe and the profile that were kept with the cell."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradsync as gs
from gradsync.cluster import Cluster
from gradsync.planner.predict import predict
from gradsync.planner.profile import ModelProfile
from nccl.arms import DDP, DDP_BF16, NO_SYNC, PLANS

_DEFAULT_MB = 25


def predicted_s(cell: dict[str, Any], arm: str) -> float | None:
    """Seconds per step; None where nothing was probed or the arm has no plan."""
    if "cluster" not in cell or "profile" not in cell:
        return None
    cluster, profile = _loaded(cell["cluster"], cell["profile"])
    if arm == NO_SYNC:
        return predict(profile, cluster, gs.Plan()).compute_s
    if arm in (DDP, DDP_BF16):
        nbytes = (cell.get("bucket_mb") or _DEFAULT_MB) << 20
        plan = gs.Plan(compress=gs.bf16() if arm == DDP_BF16 else None, bucket_bytes=nbytes)
        return predict(profile, cluster, plan, stock=True).step_s
    return predict(profile, cluster, PLANS[arm]()).step_s if arm in PLANS else None


@lru_cache
def _loaded(cluster: str, profile: str) -> tuple[Cluster, ModelProfile]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stored.toml"
        path.write_text(cluster)
        kept = Cluster.load(path)
        path.write_text(profile)
        return kept, ModelProfile.load(path)
