"""The answer as JSON: the fields are a promise, told in docs/planning.md."""

from __future__ import annotations

from typing import Any

from gradsync.cli.plan.answer import Answer
from gradsync.cli.plan.device_memory import shortage
from gradsync.cli.plan.one_line import in_one_line
from gradsync.cli.plan.text import assumptions
from gradsync.cli.plan.thresholds import Thresholds, changes
from gradsync.cluster import Cluster, Link
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.snippet import as_python, in_words

VERSION = 1  # goes up when a field changes its meaning or goes away; new ones may come at any time


def as_json(answer: Answer, found: Thresholds) -> dict[str, Any]:
    """Everything that was printed, and all candidates."""
    return {
        "command": "plan",
        "version": VERSION,
        "calibrated": answer.cluster.calibrated,
        "cluster": _cluster(answer.cluster),
        "profile": _profile(answer.profile),
        "answer": {
            "sentence": in_one_line(answer),
            "needed": answer.needed,
            "plan": answer.chosen.plan.canonical(),
            "python": as_python(answer.chosen.plan),
            "default_overhead": answer.usual.overhead,
            "ddp_overhead": answer.ddp.overhead,
            "bandwidth_under_5_percent": found.bandwidth,
            "tokens_under_5_percent": found.tokens,
            "break_even_bandwidth": found.break_even,
            "changes": [*changes(answer, found), *shortage(answer.profile, answer.cluster)],
            "assumptions": assumptions(answer),
        },
        "candidates": [_candidate(candidate) for candidate in answer.candidates],
    }


def _candidate(prediction: Prediction) -> dict[str, Any]:
    return {
        "plan": prediction.plan.canonical(),
        "words": in_words(prediction.plan),
        "step_s": prediction.step_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "compute_s": prediction.compute_s,
        "exposed_s": prediction.exposed_s,
        "overhead": prediction.overhead,
        "bytes": prediction.nbytes,
        "memory_bytes": prediction.memory_nbytes,
        "quality": prediction.quality,
        "reason": prediction.reason,
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "gpus": cluster.world_size,
        "hosts": len(cluster.hosts),
        "per_host": max(map(len, cluster.hosts)),
        "device": cluster.device.name,
        "backend": cluster.backend,
        "inside": _link(cluster.inside),
        "across": _link(cluster.across),
        "memory": None if cluster.memory is None else _link(cluster.memory),
        "shared_nic": cluster.shared_nic,
    }


def _link(link: Link) -> dict[str, Any]:
    return {"latency_s": link.latency_s, "bandwidth": link.bandwidth, "load": link.load, "spread": link.spread}


def _profile(profile: ModelProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "source": profile.source,
        "params": profile.num_params,
        "gradient_bytes": profile.nbytes,
        "tokens": profile.tokens,
        "compute_s": profile.compute_s,
        "forward_s": profile.forward_s,
        "backward_s": profile.backward_s,
        "optimizer_s": profile.optimizer_s,
        "input_s": profile.input_s,
    }
