"""What compressors cost here: each makes the journey of a bucket, as in training, but sends nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from statistics import median

import torch

from gradsync.cluster import CodecSpeed
from gradsync.compress.cast import bf16, fp16
from gradsync.compress.integers import int4, int8
from gradsync.compress.powersgd import powersgd
from gradsync.compress.randomk import randomk
from gradsync.compress.recipe import Compressor
from gradsync.compress.sign import sign
from gradsync.compress.toml import canonical
from gradsync.compress.topk import topk
from gradsync.exchange.flat import FlatBucket, Form, Item, lay_out
from gradsync.exchange.pipeline import Journey
from gradsync.exchange.sender import route_of
from gradsync.probe.probe_group import ProbeGroup as Crew
from gradsync.trace.tally import CodecTally
from gradsync.transport.pending import Pending, Promise

_COMPRESSORS: tuple[Compressor, ...] = (
    *(bf16(), fp16(), int8(), int4(), sign()),
    *(topk(0.01), randomk(0.01), powersgd(4)),
)
_LARGE, _NUM_LARGE = (512, 512), 4
_SMALL = ((64, 64), (64, 96)) * 4


class _Alone:
    """A participants of one: what is sent has arrived."""

    size, rank, in_memory = 1, 0, False

    def sum(self, flat: torch.Tensor, bucket: int) -> Pending:
        return _arrived()

    def sum_share(self, form: Form) -> float:
        return 0.0

    def sum_way(self, form: Form) -> str:
        return "none"

    def gather(self, rows: torch.Tensor, bucket: int) -> Pending:
        return _arrived()

    def trade(self, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> Pending:
        return _arrived()

    def for_sums(self, form: Form) -> torch.Tensor:
        return form.zeros()

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)


def codec_speeds(crew: Crew) -> tuple[CodecSpeed, ...]:
    """Seconds per byte of gradient of every compressor, while all ranks are at it; all get the same."""
    return tuple(_speed(crew, compressor) for compressor in _COMPRESSORS)


def _speed(crew: Crew, compressor: Compressor) -> CodecSpeed:
    """By the byte from a few large parameters, by the parameter from many small ones of unlike shapes."""
    nbytes = 4 * _NUM_LARGE * math.prod(_LARGE)
    stages = [seconds / nbytes for seconds in _journey(crew, compressor, [_LARGE] * _NUM_LARGE)]
    whole_s = sum(_journey(crew, compressor, list(_SMALL)))
    item_s = (whole_s - sum(stages) * 4 * sum(map(math.prod, _SMALL))) / len(_SMALL)
    kind = str(canonical(compressor)["kind"])
    return CodecSpeed(kind, stages[0], stages[-1], sum(stages[1:-1]), max(0.0, item_s))


def _journey(crew: Crew, compressor: Compressor, shapes: list[tuple[int, int]]) -> list[float]:
    """Seconds of each stage of a bucket of such parameters; all ranks get the same."""
    weights = [torch.empty(shape, dtype=torch.float32, device=crew.device) for shape in shapes]
    items, form = lay_out([Item.like(f"weight {i}", weight) for i, weight in enumerate(weights)], align_nbytes=1)
    choice = compressor.choose(items[0].param)
    assert choice.codec is not None
    # Neither from the user's random state nor in the user's default dtype or on the default device.
    generator = torch.Generator("cpu").manual_seed(0)
    gradient = torch.randn(form.numel, generator=generator, dtype=torch.float32, device="cpu").to(crew.device)
    flat_bucket = FlatBucket(0, gradient.clone(), items, choice)
    if choice.feedback:
        flat_bucket.residual = torch.zeros_like(gradient)
    route = route_of(choice.codec, flat_bucket, _Alone(), crew.wire, CodecTally())
    trips: list[list[float]] = []
    crew.meet()
    for step in range(3 if crew.brief else 8):
        flat_bucket.flat.copy_(gradient)
        trips.append(list(_stages(crew, route.go(step))))
    mine = [median(stage) for stage in zip(*trips[1:], strict=True)]  # the first one is never like the others
    return [median(each) for each in zip(*crew.tell(mine), strict=True)]


def _stages(crew: Crew, journey: Journey) -> Iterator[float]:
    """Seconds before the first round, between two, and after the last; of a core, where it is one that works."""
    clock = time.thread_time if crew.device.type == "cpu" else time.perf_counter
    end = object()
    stop: object = None
    while stop is not end:
        crew.settle()
        begun = clock()
        stop = next(journey, end)
        crew.settle()
        yield clock() - begun


def _arrived() -> Pending:
    pending = Promise("nothing", 0, 0)
    pending.finish()
    return pending
