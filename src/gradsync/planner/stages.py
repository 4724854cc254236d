"""A bucket's rounds under a compressor, as seconds: what is computed and what is sent, in their order.

    Compute   encodes, decodes, or what is between    Stage on a core     by what was measured, else by memory traffic
    Sum       of the payload                          Stage on the links  by `collective`
    Gather    everybody's to everybody
    Trade     a part to each
    across    a sum in the host │ such rounds between hosts │ a sum in the host

The rounds are those that are run (`compress.rounds`), read from a `BucketForm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from gradsync.algorithms.price import Algorithm
from gradsync.cluster import CodecSpeed, Device
from gradsync.compress.param import Param
from gradsync.compress.recipe import Choice, Codec
from gradsync.compress.rounds import BucketForm, Compute, Gather, Sum, SumInside, Trade, across, exact
from gradsync.planner.collective import CollectiveCost, Collectives

_EFFICIENCY = {"gpu": 0.85, "cpu": 0.4}  # a kernel reaches most of the bandwidth of a copy


class Stage(NamedTuple):
    """One part of a bucket's rounds, which come one after the other."""

    seconds: float
    load: float
    on_wire: bool
    nbytes: float = 0.0  # sent to others
    host_s: float = 0.0  # of the host, to issue it to a GPU


@lru_cache(maxsize=1 << 16)
def payload_nbytes(codec: Codec, param: Param) -> int:
    """The payload of one parameter; remembered, since a planner asks many times."""
    return codec.nbytes(param)


@lru_cache(maxsize=1024)
def gathers(codec: Codec, param: Param, size: int) -> bool:
    """Return whether a rank holds the payloads of all at once."""
    return any(isinstance(stage, Gather) for stage in codec.rounds(BucketForm([param], size)))


def stages(
    choice: Choice, params: Sequence[Param], collectives: Collectives, algorithm: Algorithm | None
) -> list[Stage]:
    """Return what a bucket of these parameters goes through; what like ones cost is remembered."""
    key = (choice, algorithm, tuple((param.shape, param.dtype) for param in params))
    if key not in collectives.stages:
        collectives.stages[key] = list(_stages(choice, params, collectives, algorithm))
    return collectives.stages[key]


def _stages(
    choice: Choice, params: Sequence[Param], collectives: Collectives, algorithm: Algorithm | None
) -> Iterator[Stage]:
    device, codec = collectives.cluster.device, choice.codec
    by_host = choice.across and collectives.num_hosts > 1
    member = collectives.num_hosts if by_host else None
    bucket = BucketForm(params, member or collectives.size, collectives.in_memory)
    rounds = exact(bucket) if codec is None else codec.rounds(bucket)
    encode, decode, between = (0.0, 0.0, 0.0) if codec is None else _seconds(codec, device, bucket)
    # Either a thread wakes up for each part, or the host issues it to a GPU and goes on.
    wakes_s, issues_s = (0.0, device.call_s) if collectives.on_stream else (device.call_s, 0.0)
    host_s = _host_s(codec, device, bucket) if codec is not None and collectives.on_stream else 0.0

    def sent(cost: CollectiveCost) -> Stage:
        return Stage(cost.seconds, cost.load, True, cost.nbytes, issues_s)

    for stage in across(bucket, rounds, encodes=True) if by_host else rounds:
        match stage:
            case Compute():
                seconds = stage.encode * encode + stage.decode * decode + stage.between * between
                yield Stage(seconds + wakes_s, 1.0, False, host_s=host_s)
                host_s = 0.0  # of all parts, with the first
            case Sum(payload):
                nbytes = payload.nbytes
                yield sent(collectives.across(nbytes) if by_host else collectives.sum(algorithm, nbytes))
            case Gather(rows):
                yield sent(collectives.gather(rows.nbytes, member))
            case Trade(_, mine):
                yield sent(collectives.trade(mine.nbytes, member))
            case SumInside(payload):
                yield sent(collectives.within_hosts(payload.nbytes))


def _seconds(codec: Codec, device: Device, bucket: BucketForm) -> tuple[float, float, float]:
    """The seconds to encode and to decode a bucket, and what is between two rounds."""
    speed = _speed(codec, device)
    nbytes = bucket.whole.nbytes
    items_s = speed.item_s * len(bucket.params) / (3 if speed.middle_s else 2)
    middle_s = speed.middle_s * nbytes + items_s if speed.middle_s else 0.0
    return speed.encode_s * nbytes + items_s, speed.decode_s * nbytes + items_s, middle_s


def _host_s(codec: Codec, device: Device, bucket: BucketForm) -> float:
    """The host's seconds to issue all that is computed of a bucket."""
    speed, shapes = _speed(codec, device), [param.shape for param in bucket.params]
    return speed.host_s + speed.host_item_s * sum(1 for _ in groupby(shapes))


def _speed(codec: Codec, device: Device) -> CodecSpeed:
    return next((each for each in device.codecs if each.kind == codec.name), None) or _derived(codec, device)


def _derived(codec: Codec, device: Device) -> CodecSpeed:
    by_byte = (each / 4 / (device.memory_bandwidth * _EFFICIENCY[device.kind]) for each in codec.traffic)
    return CodecSpeed(codec.name, *by_byte)
