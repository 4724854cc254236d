"""What computes on a rank, as data: how fast it is, and how fast it packs gradients."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from gradsync import tables


class CodecSpeed(NamedTuple):
    """What a compressor costs on a device, in seconds per byte of gradient.

    `encode_s` makes a payload (with error feedback, where the compressor has it by default); `decode_s` adds one
    payload to the gradient; `middle_s` is what a second round needs between the two (PowerSGD's Q). `item_s` comes on
    top for each parameter, whatever its size.
    """

    kind: str  # the compressor's name in a plan: "int8", "powersgd" ...
    encode_s: float
    decode_s: float
    middle_s: float = 0.0
    item_s: float = 0.0


@dataclass(frozen=True)
class Device:
    """What computes on one rank.

    Args:
        name: As in the catalogue, or what the probe saw.
        kind: "gpu": codecs and collectives share it with computation. "cpu": they share the cores.
        flops: The most 16-bit operations per second that it could do; 0: unknown.
        memory_nbytes: How much it holds; 0: unknown.
        memory_bandwidth: Bytes per second, read and written together, of a copy.
        cores: How many cores a rank has for itself while all ranks of the host are busy; 2/3 where three
            ranks share two cores. For a GPU, 1: whatever runs beside a computation slows it down.
        codecs: Measured speeds; what is missing is derived from the memory bandwidth.
        call_s: Seconds from a bucket's being ready to its first byte, and for each further round: Python, mostly.
        jitter: Relative standard deviation of a step's computation, from step to step and from rank to rank.
    """

    name: str = "cpu"
    kind: Literal["cpu", "gpu"] = "cpu"
    flops: float = 0.0
    memory_nbytes: float = 0.0
    memory_bandwidth: float = 10e9
    cores: float = 1.0
    codecs: tuple[CodecSpeed, ...] = ()
    call_s: float = 200e-6
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "gpu"):
            raise ValueError(f'Device: kind must be "cpu" or "gpu", got {self.kind!r}')
        for name in ("memory_bandwidth", "cores"):
            if not _is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise ValueError(f"Device: {name} must be a positive number, got {getattr(self, name)!r}")
        for name in ("flops", "memory_nbytes", "call_s", "jitter"):
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"Device: {name} must be a number, 0 or more, got {getattr(self, name)!r}")
        object.__setattr__(self, "codecs", tuple(CodecSpeed(*speed) for speed in self.codecs))

    def canonical(self) -> dict[str, Any]:
        """Plain data that says the same: what a file holds."""
        table = asdict(self)
        del table["codecs"]
        return table | ({"codecs": [speed._asdict() for speed in self.codecs]} if self.codecs else {})

    @classmethod
    def from_canonical(cls, where: str, table: object) -> Device:
        """The device of a file's table; `where` begins the sentence if it is none."""
        given = tables.check_fields(where, "device", table, [f.name for f in fields(cls)])
        tables.check_kind(where, given, "name", str, "a text in quotes")
        tables.check_kind(where, given, "codecs", list, "a list of tables, each under [[device.codecs]]")
        codecs = [_codec_from(f"{where} codecs[{i}]", codec) for i, codec in enumerate(given.get("codecs", []))]
        return tables.make(where, cls, **{**given, "codecs": codecs})


def _codec_from(where: str, table: object) -> CodecSpeed:
    needed = ["kind", "encode_s", "decode_s"]
    given = tables.check_fields(where, "codec", table, CodecSpeed._fields, needed)
    tables.check_kind(where, given, "kind", str, "a compressor's name in quotes")
    for key in given:
        if key != "kind" and not (_is_number(given[key]) and given[key] >= 0):
            raise ValueError(f"{where}: {key} must be a number of seconds per byte, 0 or more, got {given[key]!r}")
    return CodecSpeed(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
