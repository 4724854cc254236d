"""The plans that are worth pricing: not every combination, but every answer to each question beside a sound rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate as running_sums
from typing import Literal

from gradsync.compress.cast import bf16
from gradsync.compress.integers import int4, int8
from gradsync.compress.powersgd import powersgd
from gradsync.compress.recipe import Compressor
from gradsync.compress.sign import sign
from gradsync.compress.topk import topk
from gradsync.compress.wrappers import across_hosts
from gradsync.plan.paces import accumulate, delayed, diloco, local_sgd
from gradsync.plan.packing import default_limit
from gradsync.plan.sync_plan import Plan
from gradsync.planner.collective import Collectives
from gradsync.planner.profile import ModelProfile

Allow = Literal["exact", "16-bit", "lossy", "all"]
ALLOWS: tuple[Allow, ...] = ("exact", "16-bit", "lossy", "all")

_BUCKETS = (1 << 20, 4 << 20, 25 << 20, 100 << 20)
_LOCAL_STEPS = 16
_INNER_STEPS = 50


def candidates(profile: ModelProfile, collectives: Collectives, allow: Allow) -> list[Plan]:
    """Return the plans to price, each once; the default first."""
    if allow not in ALLOWS:
        raise ValueError(f"allow must be one of {', '.join(map(repr, ALLOWS))}, got {allow!r}")
    sizes = _buckets(profile)
    plans = [Plan(), *_exact(profile, collectives, sizes)]
    for compress in _compressors(profile, collectives, allow):
        plans.append(Plan(compress=compress))
        plans += [Plan(compress=compress, bucket_bytes=size) for size in sizes]
    if allow == "all" and collectives.size > 1:
        plans += _paces(profile)
    return list(dict.fromkeys(plans))


def _exact(profile: ModelProfile, collectives: Collectives, sizes: list[int]) -> Iterator[Plan]:
    yield Plan(overlap="none")
    if collectives.size == 1:
        return
    for algorithm in collectives.candidates():
        if algorithm != collectives.resolve(None, profile.nbytes):  # the default's own
            yield Plan(algorithm=algorithm)
    for size in sizes:
        yield Plan(bucket_bytes=size)


def _compressors(profile: ModelProfile, collectives: Collectives, allow: Allow) -> Iterator[Compressor]:
    if collectives.size == 1 or allow == "exact":
        return
    if _shrinks(bf16(), profile):
        yield bf16()
    if allow == "16-bit":
        return
    for compress in (int8(), int4(), sign(), topk(0.01), powersgd(4)):
        if _shrinks(compress, profile):
            yield compress
            if collectives.num_hosts > 1 and collectives.per_host > 1:
                yield across_hosts(compress)


def _paces(profile: ModelProfile) -> Iterator[Plan]:
    half = [bf16()] if _shrinks(bf16(), profile) else []
    for compress in (None, *half):
        yield Plan(pace=delayed(1), compress=compress)
        yield Plan(pace=accumulate(4), compress=compress)
    yield Plan(pace=local_sgd(_LOCAL_STEPS))
    yield Plan(pace=diloco(_INNER_STEPS))
    yield Plan(pace=diloco(_INNER_STEPS), compress=int4())


def _shrinks(compress: Compressor, profile: ModelProfile) -> bool:
    """Return whether payloads are smaller than the gradients: 16 bits of 16 are not."""
    payload = sum(compress.choose(gradient.param).nbytes(gradient.param) for gradient in profile.gradients)
    return payload < 0.95 * profile.nbytes


def _buckets(profile: ModelProfile) -> list[int]:
    """Sizes that would change something: at least as large as most gradients, which travel alone otherwise."""
    usual, least = default_limit(profile.nbytes), _typical_nbytes(profile)
    return [size for size in _BUCKETS if least <= size < profile.nbytes and size != usual]


def _typical_nbytes(profile: ModelProfile) -> int:
    """Half of all bytes are in gradients of at most this size."""
    sizes = sorted(gradient.nbytes for gradient in profile.gradients)
    half, sums = sum(sizes) / 2, running_sums(sizes)
    return next(size for size, passed in zip(sizes, sums, strict=True) if passed >= half)
