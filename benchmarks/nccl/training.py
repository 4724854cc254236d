"""In a rank: arms take turns on each workload; before that a probe and a scan of DDP's bucket sizes, if asked for."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsync.autotune.profiling import profile
from gradsync.probe.measure import measure
from nccl.arms import BUCKETS_MB, DDP, DDP_BF16, NO_SYNC, Arm, Replica
from nccl.crew import Crew
from nccl.models import Workload, workload
from nccl.turns import Contest, Course, Samples, as_facts, medians

_SCAN = Course(rounds=2, window=2, warm_up=2)
_PROFILE_STEPS = 5


def train(crew: Crew, job: dict[str, Any]) -> None:
    """Every rank calls this; rank 0 says each cell after each of its rounds."""
    shared: dict[str, Any] = _probe(crew, job["probe"]) if job.get("probe") else {}
    for kind, cell in job["cells"].items():
        made = workload(kind, crew.dry)
        facts = {**shared, "ranks": crew.size, "workload": kind}
        if job.get("probe"):
            facts["profile"] = _profile(crew, made)
        if job.get("scan"):
            facts["ddp"] = _best_bucket(crew, made)
        bucket_mb = facts["ddp"]["bucket_mb"] if "ddp" in facts else job.get("bucket_mb")
        facts["bucket_mb"] = bucket_mb
        contest = Contest(crew, made, Course(**job["course"]))
        arms = [Arm(name, bucket_mb if name in (DDP, DDP_BF16) else None, how) for name, how in job["arms"]]

        def tell(samples: Samples, cell: str = cell, contest: Contest = contest, facts: dict[str, Any] = facts) -> None:
            crew.say(cell, complete=False, **facts, **as_facts(contest, samples))

        samples = contest.run(arms, tell)
        facts["peak_gib"] = 0.0 if crew.dry else round(torch.cuda.max_memory_allocated() / 2**30, 1)
        crew.say(cell, complete=True, **facts, **as_facts(contest, samples))
        contest.finish()
        del contest, tell
        _free(crew)


def _best_bucket(crew: Crew, made: Workload) -> dict[str, Any]:
    """DDP's best bucket size; medians are of the slowest rank, so all ranks choose alike."""
    found: Samples = {}
    contest = Contest(crew, made, _SCAN)
    for bucket_mb in BUCKETS_MB:
        turn_of = contest.run([Arm(DDP, bucket_mb)])
        if DDP in turn_of:
            found[_bucket_name(bucket_mb)] = turn_of[DDP]
        contest.finish()
        _free(crew)
    tuning = {name: each["wall_s"] for name, each in medians(found).items()}
    best = min(tuning, key=lambda name: tuning[name])
    crew.note(f"DDP by bucket size: {', '.join(f'{name} {1e3 * s:.1f} ms' for name, s in tuning.items())}")
    chosen = next(bucket_mb for bucket_mb in BUCKETS_MB if _bucket_name(bucket_mb) == best)
    return {"bucket_mb": chosen, "tuning": found}


def _bucket_name(bucket_mb: int | None) -> str:
    return "default" if bucket_mb is None else f"{bucket_mb} MB"


def _probe(crew: Crew, kind: str) -> dict[str, Any]:
    """What `gradsync probe` would find out: "brief" or "full"."""
    begun = time.perf_counter()
    findings = measure(dist.distributed_c10d._get_default_group(), brief=kind == "brief" or crew.dry)
    seconds = time.perf_counter() - begun
    crew.note(f"probed in {seconds:.1f} s")
    return {
        "probe_s": round(seconds, 1),
        "probe_warnings": list(findings.warnings),
        "cluster": _text(findings.cluster.save),
    }


def _profile(crew: Crew, made: Workload) -> str:
    """A few steps without synchronization while all ranks compute: they share the GPU then too."""
    replica = Replica(crew, made, Arm(NO_SYNC))
    crew.meet()
    measured = profile(replica.model, replica.step, replica.optimizer, steps=_PROFILE_STEPS)
    crew.meet()
    return _text(measured.save)


def _free(crew: Crew) -> None:
    gc.collect()
    if not crew.dry:
        torch.cuda.empty_cache()


def _text(save: Callable[[Path], None]) -> str:
    """What it writes into a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "written.toml"
        save(path)
        return path.read_text()
