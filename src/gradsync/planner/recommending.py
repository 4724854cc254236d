"""Plans, priced and ranked: what `gradsync plan` prints and `gs.auto()` chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsync.links import Cluster
from gradsync.plan import Plan
from gradsync.planner.candidates import Allow, candidates
from gradsync.planner.collective import Collectives
from gradsync.planner.predicting import predict
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile

_WORTH_IT = 0.015  # less than this share of a step is no reason to change anything
_FITS = 0.02  # of the step: what is exposed is not worth a word
_SIMPLE = ("exact", "16-bit", "lossy", "other training")


def recommend(
    profile: ModelProfile, cluster: Cluster, allow: Allow = "all", plans: Sequence[Plan] | None = None
) -> list[Prediction]:
    """Plans with what they will cost here, the recommended one first, the others by their step time.

    Of plans that are about equally fast the simplest is recommended: the default, before exact ones, before 16 bits,
    before lossy ones, before those that change what is learned. `plans` are priced instead of our own candidates;
    the default is always among them.

    >>> import torch
    >>> from gradsync.links import Link
    >>> from gradsync.planner.profile import Gradient
    >>> profile = ModelProfile((Gradient("w", (1000, 1000), torch.float32, 0.02),), 0.01, 0.02)
    >>> fast, slow = (Cluster(((0,), (1,)), Link(1e-5, b), Link(1e-5, b)) for b in (10e9, 10e6))
    >>> recommend(profile, fast, allow="lossy")[0].plan == Plan()
    True
    >>> recommend(profile, slow, allow="16-bit")[0].quality
    '16-bit'
    """
    collectives = Collectives(cluster)
    wanted = candidates(profile, collectives, allow) if plans is None else [Plan(), *plans]
    found = [predict(profile, cluster, plan, collectives) for plan in dict.fromkeys(wanted)]
    default = found[0]
    ranked = sorted(found, key=lambda each: each.step_s)
    good_enough = [each for each in found if each.step_s <= ranked[0].step_s * (1 + _WORTH_IT)]
    best = min(good_enough, key=lambda each: (each.plan != Plan(), _SIMPLE.index(each.quality), each.step_s))
    ranked.remove(best)
    return [replace(each, reason=reason(each, default, cluster)) for each in (best, *ranked)]


def reason(prediction: Prediction, default: Prediction, cluster: Cluster) -> str:
    """One sentence: why this plan, or why not."""
    if cluster.world_size == 1:
        return "one rank alone has nothing to synchronize"
    fits = default.exposed_s <= _FITS * default.step_s
    if prediction.plan == Plan():
        if fits:
            return "communication fits into backward: compressing would buy nothing"
        return f"{_ms(default.exposed_s)} of communication stick out of backward"
    gain = default.step_s - prediction.step_s
    if abs(gain) <= _WORTH_IT * default.step_s:
        if prediction.quality == "exact":
            return "no faster and no slower than the default"
        return "communication fits into backward already" if fits else "what it saves on the wire it costs elsewhere"
    if gain < 0:
        return f"slower than the default by {_ms(-gain)}{_why_slower(prediction, default)}"
    saved = f"saves {_ms(gain)} of {_ms(default.exposed_s)}"
    if prediction.quality == "other training":
        return f"{saved}, but changes what is learned: compare the loss"
    if prediction.quality != "exact":
        factor = default.nbytes / prediction.nbytes if prediction.nbytes else 0.0
        fewer = f"{factor:.1f} times fewer bytes" if factor > 1 else "fewer bytes"
        return f"{fewer}: {saved}"
    if prediction.plan.bucket_bytes is not None:
        return f"buckets of this size: {saved}"
    return f"this algorithm: {saved}"


def _why_slower(prediction: Prediction, default: Prediction) -> str:
    if prediction.plan.overlap == "none":
        return ": nothing is hidden behind backward"
    if prediction.plan.compress is not None and prediction.nbytes < default.nbytes:
        return ": packing takes longer than the bytes that it saves"
    if prediction.nbytes > default.nbytes * 1.01:
        return ": it sends more"
    if prediction.plan.bucket_bytes is not None:
        return ": buckets of this size do not overlap as well"
    return ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
