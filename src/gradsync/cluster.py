"""A cluster as data: hosts of ranks, the link inside a host and the one between hosts, and how fast a rank computes and
packs gradients.

It is not in `plan/`: algorithms are priced on links, and a plan names algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from gradsync import tables


class CodecSpeed(NamedTuple):
    """The cost of a compressor on a device, in seconds per byte of gradient.

    `encode_s` makes a payload (with error feedback, where the compressor has it by default); `decode_s` adds one
    payload to the gradient; `middle_s` is what a second round needs between the two (PowerSGD's Q). `item_s` comes on
    top for each parameter, whatever its size.

    On a GPU these are seconds of its stream, and the host needs its own to issue all that: `host_s` for a bucket, and
    `host_item_s` beyond that for each of its runs of parameters of one shape.
    """

    kind: str  # the compressor's name in a plan: "int8", "powersgd" ...
    encode_s: float
    decode_s: float
    middle_s: float = 0.0
    item_s: float = 0.0
    host_s: float = 0.0
    host_item_s: float = 0.0


@dataclass(frozen=True)
class Device:
    """The device that computes on one rank.

    Args:
        name: As in the catalogue, or what the probe saw.
        kind: "gpu": codecs and collectives share it with computation. "cpu": they share the cores.
        flops: The most 16-bit operations per second that it could do; 0: unknown.
        memory_nbytes: How much it holds; 0: unknown.
        memory_bandwidth: Bytes per second, read and written together, of a copy.
        cores: How many cores a rank has for itself while all ranks of the host are busy; 2/3 where three
            ranks share two cores. For a GPU, 1: whatever runs beside a computation slows it down.
        codecs: Measured speeds; what is missing is derived from the memory bandwidth.
        call_s: Seconds from a bucket's being ready to its first byte, and for each further round: Python, mostly. Over
            NCCL they are the host's, which runs ahead of the GPU.
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


Backend = Literal["gloo", "nccl"]
Hosts = tuple[tuple[int, ...], ...]


def as_hosts(hosts: int | Sequence[Sequence[int]]) -> Hosts:
    """The ranks of each host; a number of ranks means one host that holds them all.

    >>> as_hosts(3), as_hosts([[0, 2], [1]])
    (((0, 1, 2),), ((0, 2), (1,)))
    """
    if isinstance(hosts, int):
        if isinstance(hosts, bool) or hosts < 1:
            raise ValueError(f"hosts must be a number of ranks of at least 1, or the ranks of each host, got {hosts!r}")
        return (tuple(range(hosts)),)
    named = tuple(tuple(host) for host in hosts)
    ranks = [rank for host in named for rank in host]
    if not ranks or not all(named) or any(type(rank) is not int for rank in ranks):
        raise ValueError(f"hosts must be one list of ranks per host, none of them empty, got {hosts!r}")
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"hosts must name every rank from 0 to {len(ranks) - 1} once, got {hosts!r}")
    return named


@dataclass(frozen=True)
class Link:
    """A wire: a message of b bytes takes `latency_s + b / bandwidth_at(b)` seconds.

    Args:
        latency_s: Seconds until the first byte is there, whatever the size.
        bandwidth: Bytes per second of large messages, each way at once.
        curve: What smaller ones get: pairs of (message bytes, bytes per second), by rising size; from the last size on
            it is `bandwidth`.
        load: How much of a processor core (or of a GPU) is kept busy while bytes move at full speed, from 0 to 1:
            computation beside it is slower by so much.
        spread: How far measurements lie from this model, as a relative standard deviation.

    >>> Link(latency_s=50e-6, bandwidth=125e6).seconds(1e6)
    0.00805
    """

    latency_s: float
    bandwidth: float
    curve: tuple[tuple[float, float], ...] = ()
    load: float = 0.0
    spread: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """The seconds that one message takes."""
        return self.latency_s + nbytes / self.bandwidth_at(nbytes)

    def bandwidth_at(self, nbytes: float) -> float:
        """Bytes per second in a message of this size; between two points of the curve, seconds rise by the byte.

        >>> round(Link(0.0, 100e6, curve=((1e3, 10e6), (1e5, 50e6))).bandwidth_at(5e4))
        48058252
        """
        if not self.curve or nbytes >= self.curve[-1][0]:
            return self.bandwidth
        below = above = self.curve[0]
        for above in self.curve:
            if nbytes < above[0]:
                break
            below = above
        if below is above:
            return below[1]
        part = (nbytes - below[0]) / (above[0] - below[0])
        seconds = (1 - part) * below[0] / below[1] + part * above[0] / above[1]
        return nbytes / seconds

    def __post_init__(self) -> None:
        if not _is_number(self.latency_s) or self.latency_s < 0:
            raise ValueError(f"Link: latency_s must be a number of seconds, 0 or more, got {self.latency_s!r}")
        if not _is_number(self.bandwidth) or self.bandwidth <= 0:
            raise ValueError(f"Link: bandwidth must be a positive number of bytes per second, got {self.bandwidth!r}")
        object.__setattr__(self, "curve", tuple((size, rate) for size, rate in self.curve))
        sizes = [size for size, _ in self.curve]
        if not all(_is_number(x) and x > 0 for point in self.curve for x in point) or sizes != sorted(set(sizes)):
            raise ValueError(
                "Link: curve must be pairs of (message bytes, bytes per second), all positive, by rising size, "
                f"got {self.curve!r}"
            )
        if not _is_number(self.load) or not 0 <= self.load <= 1:
            raise ValueError(f"Link: load must be a share of a core, from 0 to 1, got {self.load!r}")
        if not _is_number(self.spread) or self.spread < 0:
            raise ValueError(f"Link: spread must be a relative deviation, 0 or more, got {self.spread!r}")


@dataclass(frozen=True)
class Cluster:
    """Hosts and their links.

    Args:
        hosts: The ranks of each host; see `as_hosts`.
        inside: The link between two ranks of one host.
        across: The link between two hosts.
        shared_nic: True: the ranks of a host share one `across` link. False: each has its own.
        reduce_s_per_byte: Seconds to add one received byte to one's own.
        memory: What the ranks of a host share, if they do, as if each had such a link to all others.
        backend: "nccl": collectives are priced by NCCL's own model.
        device: What computes on each rank.
        calibrated: Whether these are measurements (`gradsync probe`), or figures of a catalogue.
        name: For people.

    >>> cluster = Cluster(((0, 1), (2, 3)), inside=Link(1e-6, 1e10), across=Link(50e-6, 125e6))
    >>> cluster.world_size, cluster.host_by_rank()
    (4, {0: 0, 1: 0, 2: 1, 3: 1})
    """

    hosts: Hosts
    inside: Link
    across: Link
    shared_nic: bool = True
    reduce_s_per_byte: float = 0.0
    memory: Link | None = None
    backend: Backend = "gloo"
    device: Device = field(default_factory=Device)
    calibrated: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", as_hosts(self.hosts))  # lists become tuples: a cluster can be a key
        if self.backend not in get_args(Backend):
            raise ValueError(f'Cluster: backend must be "gloo" or "nccl", got {self.backend!r}')
        if not _is_number(self.reduce_s_per_byte) or self.reduce_s_per_byte < 0:
            raise ValueError(
                "Cluster: reduce_s_per_byte must be a number of seconds per byte, 0 or more, "
                f"got {self.reduce_s_per_byte!r}"
            )

    @property
    def world_size(self) -> int:
        return sum(len(host) for host in self.hosts)

    def host_by_rank(self) -> dict[int, int]:
        """The index of each rank's host."""
        return {rank: index for index, host in enumerate(self.hosts) for rank in host}

    def save(self, path: str | Path) -> None:
        """Write the cluster as TOML; `docs/links.md` explains every field."""
        tables.write(path, "A gradsync cluster: gradsync plan --cluster FILE", self.canonical())

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster from TOML."""
        table = tables.read(path)
        where = str(path)
        tables.check_fields(where, "cluster", table, [*_LAYOUT, *(f.name for f in fields(cls))], ["inside"])
        for key in ("shared_nic", "calibrated"):
            tables.check_kind(where, table, key, bool, "true or false")
        tables.check_kind(where, table, "name", str, "a text in quotes")
        table["hosts"] = _hosts_from(where, table)
        for key in ("inside", "across", "memory"):
            if key in table:
                table[key] = _link_from(f"{where}: [{key}]", table[key])
        if len(table["hosts"]) == 1:
            table.setdefault("across", table["inside"])
        elif "across" not in table:
            raise ValueError(f"{where}: [across] is missing, the link between the {len(table['hosts'])} hosts")
        if "device" in table:
            table["device"] = Device.from_canonical(f"{where}: [device]", table["device"])
        return tables.make(where, cls, **{key: value for key, value in table.items() if key not in _LAYOUT})

    def canonical(self) -> dict[str, Any]:
        """Plain data that says the same: what a file holds."""
        table: dict[str, Any] = {
            "name": self.name,
            "calibrated": self.calibrated,
            "backend": self.backend,
            "shared_nic": self.shared_nic,
            "reduce_s_per_byte": self.reduce_s_per_byte,
        }
        num_hosts, ranks_per_host = len(self.hosts), len(self.hosts[0])
        if self.hosts == _regular(num_hosts, ranks_per_host):
            table |= {"num_hosts": num_hosts, "ranks_per_host": ranks_per_host}
        else:
            table["hosts"] = self.hosts
        for key, link in (("inside", self.inside), ("across", self.across), ("memory", self.memory)):
            if link is not None:
                table[key] = {name: value for name, value in asdict(link).items() if value != ()}
        table["device"] = self.device.canonical()
        return table


# Instead of the ranks of each host, where hosts are alike and ranks stand in order.
_LAYOUT = ("num_hosts", "ranks_per_host")
_MOST_RANKS = 1_000_000


def _regular(num_hosts: int, ranks_per_host: int) -> Hosts:
    starts = range(0, num_hosts * ranks_per_host, ranks_per_host)
    return tuple(tuple(range(start, start + ranks_per_host)) for start in starts)


def _hosts_from(where: str, table: tables.Table) -> Hosts:
    if "hosts" in table:
        if extra := [key for key in _LAYOUT if key in table]:
            raise ValueError(f"{where}: hosts names every rank already, leave {' and '.join(extra)} out")
        if not isinstance(table["hosts"], list) or not all(isinstance(host, list) for host in table["hosts"]):
            raise ValueError(f"{where}: hosts must be one list of ranks per host, as in [[0, 1], [2]]")
        return tables.make(where, as_hosts, hosts=table["hosts"])
    for key in _LAYOUT:
        if key not in table:
            raise ValueError(f"{where}: {key} is missing; a cluster needs num_hosts and ranks_per_host, or hosts")
        if type(table[key]) is not int or not 1 <= table[key] <= _MOST_RANKS:
            raise ValueError(f"{where}: {key} must be a whole number from 1 to {_MOST_RANKS:,}, got {table[key]!r}")
    if table["num_hosts"] * table["ranks_per_host"] > _MOST_RANKS:
        raise ValueError(
            f"{where}: {table['num_hosts']} hosts of {table['ranks_per_host']} are more than {_MOST_RANKS:,} ranks"
        )
    return _regular(table["num_hosts"], table["ranks_per_host"])


def _link_from(where: str, table: object) -> Link:
    given = tables.check_fields(where, "link", table, [f.name for f in fields(Link)], ["latency_s", "bandwidth"])
    curve = given.get("curve", [])
    if not isinstance(curve, list) or not all(isinstance(point, list) and len(point) == 2 for point in curve):
        raise ValueError(f"{where}: curve must be pairs of [message bytes, bytes per second], as in [[4096, 1e9]]")
    return tables.make(where, Link, **given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
