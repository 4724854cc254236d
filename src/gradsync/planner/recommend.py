"""Plans, priced and ranked: what `gradsync plan` prints and `gs.auto()` chooses from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gradsync.cluster import Cluster
from gradsync.plan.paces import every_step
from gradsync.plan.sync_plan import Plan
from gradsync.planner.candidates import Allow, candidates
from gradsync.planner.collective import Collectives
from gradsync.planner.predict import TYPICAL, predict
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.units import show_seconds

# What a plan must save, as a share of the step that one takes which changes less, to be recommended before it.
_WORTH_IT = (
    ("exact", 0.015),
    ("16-bit", 0.015),
    ("int8", 0.03),
    ("int4", 0.05),
    ("lossy", 0.5),  # by the clock int4 learned faster than plans whose steps took two thirds of its (losses.SOURCE)
    ("other training", 0.1),
)
SAME = 0.015  # of the step: two plans are about equally fast
_FITS = 0.02  # of the step: what is exposed is not worth a word


def recommend(
    profile: ModelProfile, cluster: Cluster, allow: Allow = "all", plans: Sequence[Plan] | None = None
) -> list[Prediction]:
    """Plans with what they will cost here, the recommended one first, the others by what synchronization costs.

    The default is recommended unless another exact plan is faster by more than 1.5 % of a step, that one unless one of
    16 bits is, that one unless int8 is by 3 %, int4 by 5 %, another lossy one by half of it, and that one unless one
    that changes what is learned is by another 10 %; and each only if it is faster than the default by more than its own
    prediction may be off. Of plans about equally fast it is the one of which less is said. `plans`, if given, are
    priced instead of our own candidates, and then the fastest is recommended; the default is always among them.

    >>> import torch
    >>> from gradsync.cluster import Link
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
    # By what is exposed: with `accumulate(k)` a step is shorter also because the optimizer steps less often.
    ranked = sorted(found, key=lambda each: each.exposed_s)
    best = pick(ranked) if plans is None else ranked[0]
    ranked.remove(best)
    return [replace(each, reason=reason(each, default, cluster)) for each in (best, *ranked)]


def pick(found: Sequence[Prediction]) -> Prediction:
    """The prediction that changes least, of those fast enough; the default's is among them."""
    best = default = next(each for each in found if each.plan == Plan())
    ranked = sorted(found, key=lambda each: each.exposed_s)
    for kind, worth in _WORTH_IT:
        rivals = [each for each in ranked if kind in (each.quality, _codec_of(each.plan))]
        rival = simplest(rivals[0], rivals) if rivals else best
        sure = default.exposed_s - rival.exposed_s > rival.unsure_s
        if sure and best.exposed_s - rival.exposed_s > worth * best.step_s:
            best = rival
    return best


def simplest(one: Prediction, found: Iterable[Prediction]) -> Prediction:
    """The plan with this one's compressor and pace that says least beside, if it is about as fast."""
    alike = [each for each in found if (each.plan.compress, each.plan.pace) == (one.plan.compress, one.plan.pace)]
    as_fast = [each for each in alike if each.exposed_s - one.exposed_s <= SAME * one.step_s]
    return min(as_fast, key=lambda each: _num_options(each.plan), default=one)


def _num_options(plan: Plan) -> int:
    usual = Plan()
    return sum(getattr(plan, name) != getattr(usual, name) for name in ("algorithm", "bucket_bytes", "overlap"))


def _codec_of(plan: Plan) -> str | None:
    """The name of a plan's codec, None for another pace: with that, gentle codecs are no longer gentle."""
    codec = plan.compress.choose(TYPICAL).codec if plan.compress is not None and plan.pace == every_step() else None
    return None if codec is None else codec.name


def reason(prediction: Prediction, default: Prediction, cluster: Cluster) -> str:
    """One sentence: why this plan, or why not."""
    if cluster.world_size == 1:
        return "one rank alone has nothing to synchronize"
    fits = default.exposed_s <= _FITS * default.step_s
    if prediction.plan == Plan():
        if fits:
            return "communication fits into backward: compressing would buy nothing"
        return f"{show_seconds(default.exposed_s)} of communication stick out of backward"
    gain = default.exposed_s - prediction.exposed_s
    if abs(gain) <= SAME * default.step_s:
        if prediction.quality == "exact":
            return "no faster and no slower than the default"
        return "communication fits into backward already" if fits else "what it saves on the wire it costs elsewhere"
    if gain < 0:
        return f"slower than the default by {show_seconds(-gain)}{_why_slower(prediction, default)}"
    saved = f"saves {show_seconds(gain)} of {show_seconds(default.exposed_s)}"
    if prediction.quality == "other training":
        return f"{saved}, but changes what is learned: compare the loss"
    if gain <= prediction.unsure_s:
        saved += ", within its interval"
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
        return ": packing costs more than it saves"
    if prediction.nbytes > default.nbytes * 1.01:
        return ": it sends more"
    if prediction.plan.bucket_bytes is not None:
        return ": buckets of this size do not overlap as well"
    return ""
