"""What compressors cost here: each makes the journey of a bucket, as in training, but sends nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch

from gradsync.compress.cast import bf16, fp16
from gradsync.compress.choice import Compressor, Param
from gradsync.compress.integers import int4, int8
from gradsync.compress.powersgd import powersgd
from gradsync.compress.randomk import randomk
from gradsync.compress.recipes import canonical
from gradsync.compress.sign import sign
from gradsync.compress.topk import topk
from gradsync.devices import CodecSpeed
from gradsync.exchange.desk import Journey
from gradsync.exchange.memory import Form
from gradsync.exchange.parcel import Item, Parcel
from gradsync.exchange.shipping import route_of
from gradsync.probe.crew import Crew
from gradsync.trace.tally import Account
from gradsync.transport.tickets import Promise, Ticket

_COMPRESSORS: tuple[Compressor, ...] = (
    *(bf16(), fp16(), int8(), int4(), sign()),
    *(topk(0.01), randomk(0.01), powersgd(4)),
)
_SHAPE, _NUM_PARAMS = (512, 512), 4
_NBYTES = 4 * _NUM_PARAMS * _SHAPE[0] * _SHAPE[1]


class _Alone:
    """A circle of one: what is sent has arrived."""

    size, rank, in_memory = 1, 0, False

    def sum(self, flat: torch.Tensor, bucket: int) -> Ticket:
        return _arrived()

    def sum_share(self, form: Form) -> float:
        return 0.0

    def sum_way(self, form: Form) -> str:
        return "none"

    def gather(self, rows: torch.Tensor, bucket: int) -> Ticket:
        return _arrived()

    def trade(self, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> Ticket:
        return _arrived()

    def for_sums(self, form: Form) -> torch.Tensor:
        return torch.zeros(form.numel, dtype=form.dtype, device=form.device)

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)


def codec_speeds(crew: Crew) -> tuple[CodecSpeed, ...]:
    """Seconds per byte of gradient of every compressor, while all ranks are at it; all get the same."""
    return tuple(_speed(crew, compressor) for compressor in _COMPRESSORS)


def _speed(crew: Crew, compressor: Compressor) -> CodecSpeed:
    param = Param("weight", _SHAPE)
    choice = compressor.choose(param)
    assert choice.codec is not None
    numel = param.numel
    items = [Item(f"weight {i}", i * numel, _SHAPE, (_SHAPE[1], 1)) for i in range(_NUM_PARAMS)]
    gradient = torch.randn(numel * _NUM_PARAMS, generator=torch.Generator().manual_seed(0)).to(crew.device)
    parcel = Parcel(0, gradient.clone(), items, choice)
    if choice.feedback:
        parcel.residual = torch.zeros_like(gradient)
    route = route_of(choice.codec, parcel, _Alone(), crew.wire, Account())
    trips: list[list[float]] = []
    crew.meet()
    for step in range(3 if crew.brief else 8):
        parcel.flat.copy_(gradient)
        trips.append(list(_stages(crew, route.go(step))))
    mine = [median(stage) / _NBYTES for stage in zip(*trips[1:], strict=True)]  # the first one is never like the others
    stages = [median(each) for each in zip(*crew.tell(mine), strict=True)]
    kind = str(canonical(compressor)["kind"])
    return CodecSpeed(kind, encode_s=stages[0], decode_s=stages[-1], middle_s=sum(stages[1:-1]))


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


def _arrived() -> Ticket:
    ticket = Promise("nothing", 0, 0)
    ticket.finish()
    return ticket
