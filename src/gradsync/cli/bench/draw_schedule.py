"""`gradsync bench --draw`: the way the bytes travel, for any ranks and hosts, without any bytes."""

from __future__ import annotations

from collections.abc import Mapping

from gradsync.algorithms.schedule import Recipe, Schedule
from gradsync.cluster import Hosts
from gradsync.plan.sync_plan import ALGORITHMS

RECIPES: Mapping[str, Recipe] = {name: kind() for name, kind in ALGORITHMS.items() if issubclass(kind, Recipe)}

_MOST_RANKS = 64


def parse_hosts(text: str) -> Hosts:
    """`2x4` is two hosts of four ranks; `4,3` is one of four and one of three.

    >>> parse_hosts("2x2"), parse_hosts("2,1")
    (((0, 1), (2, 3)), ((0, 1), (2,)))
    """
    try:
        if "x" in text:
            count, each = (int(part) for part in text.split("x"))
            sizes = [each] * min(count, _MOST_RANKS + 1)
        else:
            sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or sum(sizes) > _MOST_RANKS:
        raise ValueError(f"needs hosts as in 2x4 or 4,3, up to {_MOST_RANKS} ranks together, got {text!r}")
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))


def sketch(name: str, hosts: Hosts) -> Schedule:
    """The schedule of the recipe of that name.

    >>> len(sketch("ring", parse_hosts("1x4")).rounds)
    6
    """
    return RECIPES[name].schedule(hosts)
