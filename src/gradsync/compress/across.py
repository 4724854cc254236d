"""Across hosts: as it is where links are fast, compressed where they are slow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsync.compress.arguments import check_inner
from gradsync.compress.choice import Choice, Compressor, Param


@dataclass(frozen=True)
class AcrossHosts:
    """See `across_hosts`."""

    inner: Compressor

    def __post_init__(self) -> None:
        check_inner("across_hosts", self.inner)

    def choose(self, param: Param) -> Choice:
        choice = self.inner.choose(param)
        return choice if choice.codec is None else replace(choice, across=True)


def across_hosts(inner: Compressor) -> AcrossHosts:
    """Add up exactly inside each host, and compress by `inner` only what travels between hosts.

    >>> from gradsync.compress.integers import int8
    >>> across_hosts(int8()).choose(Param("weight", (64, 64))).across
    True
    """
    return inner if isinstance(inner, AcrossHosts) else AcrossHosts(inner)
