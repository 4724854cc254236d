"""The cost of compressors here: each computes what it does with a bucket, as in training, but sends nothing."""

from __future__ import annotations

import math
import time
from statistics import median

import torch

from gradsync.cluster import CodecSpeed
from gradsync.compress.cast import bf16, fp16
from gradsync.compress.integers import int4, int8
from gradsync.compress.param import Param
from gradsync.compress.powersgd import powersgd
from gradsync.compress.randomk import randomk
from gradsync.compress.recipe import Compressor
from gradsync.compress.sign import sign
from gradsync.compress.topk import topk
from gradsync.exchange.bucket_route import PreparedRound, RoutedBucket, prepared_rounds
from gradsync.exchange.flat import FlatBucket, Form, Item, lay_out
from gradsync.probe.probe_group import ProbeGroup

_COMPRESSORS: tuple[Compressor, ...] = (
    *(bf16(), fp16(), int8(), int4(), sign()),
    *(topk(0.01), randomk(0.01), powersgd(4)),
)
_LARGE, _NUM_LARGE = (512, 512), 4
_SMALL = ((64, 64), (64, 96)) * 4


class _Alone:
    """The memory of a group of one, in which rows are those of one rank."""

    size, rank, in_memory = 1, 0, False

    def for_sums(self, form: Form) -> torch.Tensor:
        return form.zeros()

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)


def codec_speeds(group: ProbeGroup) -> tuple[CodecSpeed, ...]:
    """Seconds per byte of gradient of every compressor, while all ranks are at it; all get the same."""
    return tuple(codec_speed(group, compressor) for compressor in _COMPRESSORS)


def codec_speed(group: ProbeGroup, compressor: Compressor) -> CodecSpeed:
    """Time a codec: by the byte with a few large parameters, by the parameter with many small ones of unlike shapes."""
    nbytes = 4 * _NUM_LARGE * math.prod(_LARGE)
    codec = compressor.choose(Param("weight", _LARGE)).codec
    assert codec is not None
    parts = [seconds / nbytes for seconds in _bucket_s(group, compressor, [_LARGE] * _NUM_LARGE)]
    whole_s = sum(_bucket_s(group, compressor, list(_SMALL)))
    item_s = (whole_s - sum(parts) * 4 * sum(map(math.prod, _SMALL))) / len(_SMALL)
    return CodecSpeed(codec.name, parts[0], parts[-1], sum(parts[1:-1]), max(0.0, item_s))


def _bucket_s(group: ProbeGroup, compressor: Compressor, shapes: list[tuple[int, int]]) -> list[float]:
    """Seconds before, between and after the rounds of a bucket of such parameters; all ranks get the same."""
    weights = [torch.empty(shape, dtype=torch.float32, device=group.device) for shape in shapes]
    items, form = lay_out([Item.like(f"weight {i}", weight) for i, weight in enumerate(weights)], align_nbytes=1)
    choice = compressor.choose(items[0].param)
    assert choice.codec is not None
    # Neither from the user's random state nor in the user's default dtype or on the default device.
    generator = torch.Generator("cpu").manual_seed(0)
    gradient = torch.randn(form.numel, generator=generator, dtype=torch.float32, device="cpu").to(group.device)
    flat_bucket = FlatBucket(0, gradient.clone(), items, choice)
    flat_bucket.begin_keeping()
    prepared = prepared_rounds(choice.codec.rounds(RoutedBucket(flat_bucket, _Alone(), group.wire)), rank=0)
    steps: list[list[float]] = []
    group.meet()
    for step in range(3 if group.brief else 8):
        flat_bucket.flat.copy_(gradient)
        steps.append([_computing_s(group, each, step) for each in prepared])
    mine = [median(each) for each in zip(*steps[1:], strict=True)]  # the first one is never like the others
    return [median(each) for each in zip(*group.tell(mine), strict=True)]


def _computing_s(group: ProbeGroup, prepared: PreparedRound, step: int) -> float:
    """Seconds before the first round, between two, or after the last; of a core, where it is one that works."""
    clock = time.thread_time if group.device.type == "cpu" else time.perf_counter
    group.settle()
    begun = clock()
    for run in prepared.computing:
        run(step)
    group.settle()
    return clock() - begun
