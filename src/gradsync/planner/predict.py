"""A prediction for one plan: its buckets are laid out as the engine does, a step is played, the pace says how often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from gradsync.cluster import Cluster, Device
from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT, Choice, Compressor
from gradsync.plan.pace_recipe import (
    BetweenSteps,
    DuringBackward,
    DuringNextStep,
    DuringWindow,
    WithNeighbour,
    WithOwners,
    exchange_of,
)
from gradsync.plan.packing import default_limit, pack
from gradsync.plan.sync_plan import Plan
from gradsync.planner.collective import Collectives
from gradsync.planner.prediction import Prediction, Quality, StepSpan
from gradsync.planner.profile import Gradient, ModelProfile
from gradsync.planner.simulation import ComputeTimes, SimulatedBucket, end_s, simulate
from gradsync.planner.stages import Stage, gathers, payload_nbytes, stages
from gradsync.planner.stragglers import straggler_s

_MOST_BUCKETS, _LAST_BUCKETS = 32, 8  # to simulate one by one; of more, neighbours are simulated as one
_NINE_IN_TEN = NormalDist().inv_cdf(0.95)  # standard deviations to either side
_ENDLESS_S = 1e9
_GRADIENT_S = 40e-6  # its hook, its place in a bucket and as `.grad` again
TYPICAL = Param("layers.0.weight", (1024, 1024))
_MODEL_SPREAD = {True: 0.05, False: 0.25}  # of what the model leaves out, by whether it is calibrated


@dataclass(frozen=True)
class _Period:
    """The effect of a pace on the steps, per step."""

    step_s: float
    compute_s: float
    syncs: float  # synchronizations per step
    waits_for: float  # ranks whose slowest is waited for
    steps: float  # over how many steps a rank's luck evens out
    timeline: tuple[StepSpan, ...]


def predict(
    profile: ModelProfile, cluster: Cluster, plan: Plan, collectives: Collectives | None = None, stock: bool = False
) -> Prediction:
    """Seconds, bytes and memory of a plan.

    `collectives` of the same cluster, if there are some: they remember prices. `stock`: as DDP does it, which has no
    header and no Python for each gradient.
    """
    collectives = Collectives(cluster) if collectives is None else collectives
    buckets = lay_out(profile, plan, collectives)
    _refuse_endless(profile, buckets)
    period = _simulate_pace(profile, plan, collectives, buckets, stock)
    jitter = cluster.device.jitter if profile.jitter is None else profile.jitter
    late_s = straggler_s(period.compute_s, jitter, max(1, round(period.waits_for)), max(1, round(period.steps)))
    step_s = period.step_s + late_s
    exposed_s = max(0.0, step_s - period.compute_s)
    unsure_s = _NINE_IN_TEN * math.hypot(
        cluster.across.spread * exposed_s, _MODEL_SPREAD[cluster.calibrated] * exposed_s, 0.02 * step_s
    )
    around_s = math.hypot(unsure_s, _NINE_IN_TEN * jitter * period.compute_s)
    sent = sum(stage.nbytes for bucket in buckets for stage in bucket.stages) * period.syncs
    return Prediction(
        plan,
        step_s,
        max(period.compute_s * 0.5, step_s - around_s),
        step_s + around_s,
        period.compute_s,
        exposed_s,
        round(sent),
        memory_nbytes(profile, plan, cluster.world_size),
        quality(plan),
        timeline=period.timeline,
        unsure_s=unsure_s,
    )


@lru_cache(maxsize=1 << 16)
def _chosen(compress: Compressor, param: Param) -> Choice:
    return compress.choose(param)


def lay_out(profile: ModelProfile, plan: Plan, collectives: Collectives) -> list[SimulatedBucket]:
    """Buckets as the engine packs them, in the order in which they get full."""

    def choose(gradient: Gradient) -> Choice:
        if plan.compress is None or collectives.size == 1:
            return EXACT
        chosen = _chosen(plan.compress, gradient.param)
        return EXACT if chosen.across and collectives.num_hosts == 1 else chosen

    gradients = profile.gradients
    choices: dict[Choice, int] = {}  # numbered: comparing numbers is quick
    kinds = [(gradient.dtype, choices.setdefault(choose(gradient), len(choices))) for gradient in gradients]
    known = list(choices)
    nbytes = [gradient.nbytes for gradient in gradients]
    packed = pack(zip(kinds, nbytes, strict=True), plan.bucket_bytes or default_limit(sum(nbytes)))
    buckets = []
    for index, (numbers, (_, choice)) in enumerate(packed):
        members = [gradients[number] for number in numbers]
        played = stages(known[choice], [member.param for member in members], collectives, plan.algorithm)
        buckets.append(SimulatedBucket(f"bucket {index}", max(member.ready_s for member in members), played))
    return _merged(buckets)


def _merged(buckets: list[SimulatedBucket]) -> list[SimulatedBucket]:
    """Neighbours that go alike as one, if there are very many; not the last ones, which are waited for.

    They are ready when the first is: where the wire is what takes long, it begins then and never rests.
    """
    early, last = buckets[:-_LAST_BUCKETS], buckets[-_LAST_BUCKETS:]
    factor = math.ceil(len(early) / (_MOST_BUCKETS - _LAST_BUCKETS))
    if factor <= 1:
        return buckets
    merged: list[SimulatedBucket] = []
    count = 0
    for bucket in early:
        if count % factor and len(merged[-1].stages) == len(bucket.stages):
            both = [_both(a, b) for a, b in zip(merged[-1].stages, bucket.stages, strict=True)]
            merged[-1] = SimulatedBucket(merged[-1].label, merged[-1].ready_s, both)
        else:
            merged.append(bucket)
            count = 0
        count += 1
    return merged + last


def _both(a: Stage, b: Stage) -> Stage:
    return Stage(a.seconds + b.seconds, max(a.load, b.load), a.on_wire, a.nbytes + b.nbytes, a.host_s + b.host_s)


def _refuse_endless(profile: ModelProfile, buckets: Sequence[SimulatedBucket]) -> None:
    longest = max(profile.compute_s, *(stage.seconds for bucket in buckets for stage in bucket.stages))
    if not longest < _ENDLESS_S:
        raise ValueError(
            f"a step would take {longest:.3g} s, longer than anybody waits: look at the profile's times and at the "
            "latency and bandwidth of the links"
        )


def _simulate_pace(
    profile: ModelProfile, plan: Plan, collectives: Collectives, buckets: Sequence[SimulatedBucket], stock: bool
) -> _Period:
    """One period of the pace."""
    device, n = collectives.cluster.device, collectives.size
    header_cost = collectives.header()
    header = Stage(0.0 if stock else header_cost.seconds, header_cost.load, True)
    # Where ranks share cores, what a profile calls a second takes longer.
    share = min(1.0, device.cores)
    whole = profile.compute_s / share
    copy_s = 0.0 if n == 1 else _filling_s(profile, device, stock)
    on_stream = collectives.on_stream
    host_share = profile.host_s / profile.device_s if on_stream and profile.host_s and profile.device_s else 0.0

    match exchange := exchange_of(plan.pace):
        case DuringBackward() | DuringWindow():
            backward_s = profile.backward_s + copy_s
            stretch = backward_s / profile.backward_s if profile.backward_s else 1.0
            compute = ComputeTimes(profile.input_s + profile.forward_s, backward_s, profile.optimizer_s, host_share)
            ready = [bucket._replace(ready_s=stretch * bucket.ready_s) for bucket in buckets]
            spans = simulate(compute, ready, header, device.cores, plan.overlap == "backward", on_stream)
            k = exchange.window or 1
            others = (k - 1) * (whole - profile.optimizer_s / share)
            return _Period((end_s(spans) + others) / k, (whole + others) / k, 1 / k, n, k, tuple(spans))
        case DuringNextStep(delay):
            waiting = [bucket._replace(ready_s=0.0) for bucket in buckets]
            work = ComputeTimes(0.0, profile.device_s + copy_s, 0.0, host_share)
            spans = simulate(work, waiting, header, device.cores, overlap=True, on_stream=on_stream)
            return _Period(end_s(spans), whole, 1.0, n, delay + 1, tuple(spans))
        case BetweenSteps(steps, fragments, delay):
            alone = simulate(ComputeTimes(0.0, 0.0, 0.0), buckets, header, device.cores, False, on_stream)
            # Each fragment is hidden behind `delay` steps; what does not fit there is waited for.
            exposed = max(0.0, end_s(alone) / fragments - delay * whole) * fragments
            passes_s = exchange.passes * profile.nbytes / device.memory_bandwidth
            return _Period(whole + (exposed + passes_s) / steps, whole, 1 / steps, n, steps, tuple(alone))
        case WithNeighbour(steps):
            seconds = collectives.gather(profile.nbytes, 2).seconds if n > 1 else 0.0
            return _Period(whole + seconds / steps, whole, 1 / steps, 2, steps, ())
        case WithOwners():
            there, back = collectives.trade(profile.nbytes), collectives.gather(profile.nbytes / n)
            return _Period(whole + there.seconds + back.seconds, whole, 1.0, 1, 1, ())
    raise AssertionError(f"no price is known for {exchange!r}")


def _filling_s(profile: ModelProfile, device: Device, stock: bool) -> float:
    """The seconds to bring gradients into buckets: each is read and written once, and costs Python a moment.

    A GPU does not wait for Python, which runs ahead of it.
    """
    python_s = _GRADIENT_S * len(profile.gradients) if device.kind == "cpu" and not stock else 0.0
    return 2 * profile.nbytes / device.memory_bandwidth + python_s


def quality(plan: Plan) -> Quality:
    """Return what a plan does to training."""
    if not exchange_of(plan.pace).every_backward:
        return "other training"
    if plan.compress is None:
        return "exact"
    codec = plan.compress.choose(TYPICAL).codec
    return "lossy" if codec is None else codec.quality


def memory_nbytes(profile: ModelProfile, plan: Plan, world_size: int) -> int:
    """Copies that a plan keeps on each rank: buckets, residuals, payloads, what the pace stores."""
    if world_size == 1:
        return 0
    total, numel = profile.nbytes, profile.num_params
    nbytes = total
    if plan.compress is not None:
        choices = [(g.param, _chosen(plan.compress, g.param)) for g in profile.gradients]
        nbytes += sum(4 * param.numel for param, choice in choices if choice.feedback)
        coded = [(choice.codec, param) for param, choice in choices if choice.codec is not None]
        payload = sum(payload_nbytes(codec, param) for codec, param in coded)
        gathered = world_size == 2 and any(gathers(codec, param, world_size) for codec, param in coded)
        nbytes += payload * (world_size if gathered else 2)
    match exchange_of(plan.pace):
        case BetweenSteps(copies=copies):
            nbytes += copies * 4 * numel
        case DuringNextStep(delay):
            nbytes += delay * total
        case DuringWindow():
            nbytes += total
        case WithNeighbour() | WithOwners():
            nbytes += 2 * total
    return nbytes
