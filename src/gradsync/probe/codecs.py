"""The cost of compressors here: each computes what it does with a bucket, as in training, but sends nothing."""

from __future__ import annotations

import math
import time
from functools import partial
from statistics import median
from typing import NamedTuple

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
from gradsync.probe.gpu_stream import stream_seconds
from gradsync.probe.probe_group import ProbeGroup

_COMPRESSORS: tuple[Compressor, ...] = (
    *(bf16(), fp16(), int8(), int4(), sign()),
    *(topk(0.01), randomk(0.01), powersgd(4)),
)
_LARGE, _NUM_LARGE = (512, 512), 4
_LARGE_ON_GPU, _NUM_LARGE_ON_GPU = (1024, 1024), 6  # as large as a bucket: a small one shows what a launch costs
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
    on_gpu = group.device.type == "cuda"
    like = [_LARGE_ON_GPU] * _NUM_LARGE_ON_GPU if on_gpu else [_LARGE] * _NUM_LARGE
    nbytes = 4 * sum(map(math.prod, like))
    codec = compressor.choose(Param("weight", like[0])).codec
    assert codec is not None
    large, small = _bucket_s(group, compressor, like), _bucket_s(group, compressor, list(_SMALL))
    parts = [seconds / nbytes for seconds in large.rounds_s]
    item_s = (sum(small.rounds_s) - sum(parts) * 4 * sum(map(math.prod, _SMALL))) / len(_SMALL)
    # To a codec that takes like parameters together, if they lie side by side, the large ones are a single run.
    host_item_s = max(0.0, (small.host_s - large.host_s) / (len(_SMALL) - 1))
    host_s = max(0.0, large.host_s - host_item_s)
    return CodecSpeed(codec.name, parts[0], parts[-1], sum(parts[1:-1]), max(0.0, item_s), host_s, host_item_s)


class _BucketTimes(NamedTuple):
    """Seconds of a bucket before, between and after its rounds, and of the host to issue all that to a GPU."""

    rounds_s: list[float]
    host_s: float


def _bucket_s(group: ProbeGroup, compressor: Compressor, shapes: list[tuple[int, int]]) -> _BucketTimes:
    """The seconds of a bucket of such parameters; all ranks get the same."""
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
    group.meet()

    def bring() -> None:
        flat_bucket.flat.copy_(gradient)

    steps, host_s = 3 if group.brief else 8, 0.0
    if group.device.type == "cuda":
        parts = [partial(_compute, each) for each in prepared]
        host_s, mine = stream_seconds(group.device, bring, parts, steps)
    else:
        timed = []
        for step in range(steps):
            bring()
            timed.append([_computing_s(each, step) for each in prepared])
        mine = [median(each) for each in zip(*timed[1:], strict=True)]  # the first one is never like the others
    *rounds_s, host_s = [median(each) for each in zip(*group.tell([*mine, host_s]), strict=True)]
    return _BucketTimes(rounds_s, host_s)


def _computing_s(prepared: PreparedRound, step: int) -> float:
    """Seconds of a core before the first round, between two, or after the last."""
    begun = time.thread_time()
    _compute(prepared, step)
    return time.thread_time() - begun


def _compute(prepared: PreparedRound, step: int) -> None:
    for run in prepared.computing:
        run(step)
