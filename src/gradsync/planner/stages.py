"""A bucket's journey under a compressor, as seconds: codec, wire, codec, wire ... as `exchange.journeys` run it.

exact       wire
cast        encode │ sum of the payload │ decode
gather      encode │ everybody's to everybody │ decode all
two phases  encode │ a part to each │ decode, add, encode the part │ sums to everybody │ decode
powersgd    project │ sum of P │ orthogonalize, project back │ sum of Q │ restore
across      sum in the host │ one of these, between hosts │ back to all
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from gradsync.algorithms.price import Algorithm
from gradsync.cluster import CodecSpeed, Device
from gradsync.compress.blocks import BlockCodec, two_phases_pay
from gradsync.compress.powersgd import PowerSGD, matrix
from gradsync.compress.recipe import Choice, Codec, Param
from gradsync.planner.collective import CollectiveCost, Collectives

# Bytes of memory traffic per element and direction where nobody measured: what is read and written, each once, for
# gradients of 4 bytes with error feedback. A kernel reaches most of the bandwidth of a copy.
_TRAFFIC = {
    "fp16": (6.0, 6.0, 0.0),
    "bf16": (6.0, 6.0, 0.0),
    "int8": (13.0, 5.0, 0.0),
    "int4": (12.5, 4.5, 0.0),
    "sign": (12.1, 4.1, 0.0),
    "topk": (12.1, 4.1, 0.0),
    "randomk": (12.1, 4.1, 0.0),
    "powersgd": (12.0, 8.0, 8.0),
}
_EFFICIENCY = {"gpu": 0.85, "cpu": 0.4}
_MEASURED_RANK = 4  # of PowerSGD, in a device's codecs


class Stage(NamedTuple):
    """One thing after the other of a journey."""

    seconds: float
    load: float
    on_wire: bool
    nbytes: float = 0.0  # sent to others


@lru_cache(maxsize=1 << 16)
def payload_nbytes(codec: Codec, param: Param) -> int:
    """Of one parameter; remembered, since a planner asks many times."""
    return codec.nbytes(param)


def journey(
    choice: Choice, params: Sequence[Param], collectives: Collectives, algorithm: Algorithm | None
) -> list[Stage]:
    """What a bucket of these parameters goes through; what like ones cost is remembered."""
    key = (choice, algorithm, tuple((param.shape, param.dtype) for param in params))
    if key not in collectives.journeys:
        collectives.journeys[key] = _journey(choice, params, collectives, algorithm)
    return collectives.journeys[key]


def _journey(
    choice: Choice, params: Sequence[Param], collectives: Collectives, algorithm: Algorithm | None
) -> list[Stage]:
    raw = sum(param.nbytes for param in params)
    if choice.codec is None:
        return [_wire(collectives.sum(algorithm, raw))]
    if choice.across and collectives.num_hosts > 1:
        within_hosts = _wire(collectives.within_hosts(raw))
        inner = _compressed(choice, params, collectives, None, across=True)
        return [within_hosts, *inner, within_hosts]
    return _compressed(choice, params, collectives, algorithm, across=False)


def _compressed(
    choice: Choice, params: Sequence[Param], collectives: Collectives, algorithm: Algorithm | None, across: bool
) -> list[Stage]:
    codec = choice.codec
    assert codec is not None
    device, raw = collectives.cluster.device, sum(param.nbytes for param in params)
    payload = float(sum(payload_nbytes(codec, param) for param in params))
    size = collectives.num_hosts if across else collectives.size
    member = size if across else None
    encode, decode, middle = _seconds(codec.name, device, raw, len(params))

    def code(seconds: float) -> Stage:
        return Stage(seconds + device.call_s, 1.0, False)  # the pipeline's thread wakes up

    def add_up(nbytes: float) -> Stage:
        return _wire(collectives.across(nbytes) if across else collectives.sum(algorithm, nbytes))

    if isinstance(codec, PowerSGD):
        rows, cols = (sum(side) for side in zip(*(matrix(param.shape) for param in params), strict=True))
        scale = (1 + codec.rank / _MEASURED_RANK) / 2  # half of it is reading the matrix, whatever the rank
        sums = [add_up(4.0 * codec.rank * side) for side in (rows, cols)]
        return [code(encode * scale), sums[0], code(middle * scale), sums[1], code(decode * scale)]
    if not isinstance(codec, BlockCodec):
        return [code(encode), add_up(payload), code(decode)]
    if two_phases_pay(size, collectives.in_memory):
        there, back = collectives.trade(payload, member), collectives.gather(payload / size, member)
        return [code(encode), _wire(there), code(decode + encode / size), _wire(back), code(decode)]
    return [code(encode), _wire(collectives.gather(payload, member)), code(decode * size)]


def _wire(cost: CollectiveCost) -> Stage:
    return Stage(cost.seconds, cost.load, True, cost.nbytes)


def _seconds(kind: str, device: Device, nbytes: float, num_params: int) -> tuple[float, float, float]:
    """To encode and to decode a bucket of so many bytes of gradient, and what is between two rounds."""
    speed = next((each for each in device.codecs if each.kind == kind), None) or _derived(kind, device)
    items_s = speed.item_s * num_params / (3 if speed.middle_s else 2)
    middle_s = speed.middle_s * nbytes + items_s if speed.middle_s else 0.0
    return speed.encode_s * nbytes + items_s, speed.decode_s * nbytes + items_s, middle_s


def _derived(kind: str, device: Device) -> CodecSpeed:
    traffic = _TRAFFIC[kind]
    return CodecSpeed(kind, *(x / 4 / (device.memory_bandwidth * _EFFICIENCY[device.kind]) for x in traffic))
