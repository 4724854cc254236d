"""The finding of a check: how bad it is, what, why, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from gradsync.cli.doctor.rank_facts import Facts
from gradsync.launch.roster import spans


class Grade(IntEnum):
    """The grade of a finding, the worst first."""

    WRONG = 0  # a run will fail, hang, or be far slower than it could be
    NOTE = 1  # worth knowing: it may be meant
    OK = 2


class Finding(NamedTuple):
    """One line of the doctor's; whatever is not OK has a fix."""

    grade: Grade
    what: str
    detail: str
    fix: str = ""


def by_host(facts: Iterable[Facts]) -> dict[str, list[Facts]]:
    """The ranks of each host, by the network that they see.

    >>> from gradsync.cli.doctor.rank_facts import Facts
    >>> found = by_host([Facts(0, network="a"), Facts(1, network="b"), Facts(2, network="a")])
    >>> [[each.rank for each in host] for host in found.values()]
    [[0, 2], [1]]
    """
    hosts: dict[str, list[Facts]] = {}
    for each in facts:
        hosts.setdefault(each.network, []).append(each)
    return hosts


def on_one_host(facts: Sequence[Facts]) -> bool:
    """Return whether all ranks are here, on one host; a launcher may have been told of several nodes on it."""
    return len(by_host(facts)) == 1 and (facts[0].num_nodes <= 1 or len(facts) >= facts[0].world_size)


def who(some: Sequence[Facts]) -> str:
    """The ranks with their hosts: "ranks 0-3 (host a)" or "rank 4 (host b) and rank 5 (host c)".

    >>> from gradsync.cli.doctor.rank_facts import Facts
    >>> who([Facts(0, host="a", network="1"), Facts(1, host="a", network="1"), Facts(2, host="b", network="2")])
    'ranks 0-1 (host a) and rank 2 (host b)'
    """
    if len(some) == 1 and some[0].world_size == 1:
        return f"host {some[0].host}"
    parts = []
    for group in by_host(some).values():
        ranks = sorted(each.rank for each in group)
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)} (host {group[0].host})")
    return " and ".join(parts)
