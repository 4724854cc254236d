"""The facts that one rank knows of itself and its machine: gathered by `gather`, sent to rank 0 as JSON.

Nothing is None, so that a record can be checked by the types of the defaults: what is not known is "", 0, -1 or empty.
Ranks may run different versions, which is one of the things to find: keys that are missing keep their defaults, keys
that are not known are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_MOST_LETTERS = 20000
_MOST_ITEMS = 1000


@dataclass(frozen=True)
class Nic:
    """A network interface."""

    name: str = ""
    address: str = ""  # its first IPv4 one, else IPv6
    prefix: int = 0  # bits of the network
    mtu: int = 0
    mbit: int = -1  # as its driver says; virtual ones do not
    numa: int = -1
    up: bool = False
    virtual: bool = False  # nothing that one could plug a cable into


@dataclass(frozen=True)
class Gpu:
    """A GPU that the rank may use."""

    name: str = ""
    uuid: str = ""
    nbytes: int = 0
    peers: list[int] = field(default_factory=list)  # whose memory it can reach


@dataclass(frozen=True)
class Facts:
    """The facts of one rank."""

    rank: int = 0
    world_size: int = 1
    host: str = ""
    network: str = ""  # equal where loopback connects
    launcher: str = ""
    num_nodes: int = 0  # that the launcher speaks of
    master: str = ""
    python: str = ""
    torch: str = ""
    gradsync: str = ""
    nccl: str = ""
    backends: list[str] = field(default_factory=list)
    library: bool = False
    level: str = ""  # the instruction set that the C library uses
    compiler: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    nics: list[Nic] = field(default_factory=list)
    name_address: str = ""  # what the host's own name resolves to, which is where gloo listens if nobody says else
    towards_master: str = ""  # the interface from which packets to the master leave
    infiniband: list[str] = field(default_factory=list)
    shm_nbytes: int = -1
    shm_free_nbytes: int = -1
    memfd: bool = True
    memlock_nbytes: int = -1  # -1: without limit
    num_files: int = -1
    num_cpus: int = 0
    usable_cpus: float = 0.0  # by affinity and the container's quota
    num_threads: int = 0
    gpus: list[Gpu] = field(default_factory=list)
    device: int = -1  # the GPU that this rank will take, by its local rank
    topology: str = ""  # nvidia-smi topo -m
    trace: str = ""  # GRADSYNC_TRACE
    trace_problem: str = ""
    trace_free_nbytes: int = -1

    def record(self) -> dict[str, Any]:
        """The facts as plain data for JSON."""
        return asdict(self)

    def nic(self, name: str) -> Nic | None:
        return next((nic for nic in self.nics if nic.name == name), None)


def facts_of(record: Mapping[str, Any]) -> Facts:
    """Return the facts in what `record()` made, in this version or another.

    >>> facts_of({"rank": 3, "host": "b", "nics": [{"name": "eth0", "mtu": 9000}], "mood": "good"}).nics[0].mtu
    9000
    >>> facts_of({"rank": "three", "gpus": 5}) == Facts()
    True
    """
    plain = _fitting(record, Facts())
    nics = [Nic(**_fitting(each, Nic())) for each in plain.pop("nics", []) if isinstance(each, dict)]
    gpus = [Gpu(**_fitting(each, Gpu())) for each in plain.pop("gpus", []) if isinstance(each, dict)]
    return Facts(**plain, nics=nics, gpus=gpus)


def _fitting(record: Mapping[str, Any], default: Facts | Nic | Gpu) -> dict[str, Any]:
    """The values whose names are known and whose types are right, bounded."""
    kept: dict[str, Any] = {}
    for each in fields(default):
        usual, value = getattr(default, each.name), record.get(each.name)
        if type(usual) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(usual):
            continue
        kept[each.name] = _bounded(value, texts=each.name in ("backends", "infiniband", "variables"))
    return kept


def _bounded(value: Any, texts: bool) -> Any:
    if isinstance(value, str):
        return value[:_MOST_LETTERS]
    if isinstance(value, list):
        some = value[:_MOST_ITEMS]
        return [each for each in some if isinstance(each, str)] if texts else some
    if isinstance(value, dict):
        pairs = list(value.items())[:_MOST_ITEMS]
        return {key: text for key, text in pairs if isinstance(text, str)}
    return value
