"""Links and clusters are data, checked when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradsync.cluster import Cluster, Link, as_hosts

WIRE = Link(1e-6, 1e9)


@pytest.mark.parametrize(
    "hosts", [0, -3, True, [], [[]], [[0], []], [[0, 2]], [[0], [0]], [[1, 2]], [[0, "1"]], [[False]]]
)
def test_hosts_that_do_not_name_every_rank_once_are_refused(hosts: Any) -> None:
    with pytest.raises(ValueError, match="hosts must"):
        as_hosts(hosts)


def test_hosts_keep_their_order_and_become_tuples() -> None:
    assert as_hosts([[3, 1], range(2, 3), (0,)]) == ((3, 1), (2,), (0,))


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", None, True])
def test_a_link_with_impossible_numbers_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="Link: latency_s must be"):
        Link(value, 1.0)
    with pytest.raises(ValueError, match="Link: bandwidth must be"):
        Link(1.0, value)


def test_a_link_may_have_no_latency_but_not_no_bandwidth() -> None:
    assert Link(0, 1).latency_s == 0
    with pytest.raises(ValueError, match="bandwidth must be a positive number"):
        Link(0, 0)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", None, True])
def test_a_cluster_with_an_impossible_reduction_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="Cluster: reduce_s_per_byte must be"):
        Cluster(as_hosts(2), WIRE, WIRE, reduce_s_per_byte=value)


def test_equal_clusters_compare_equal_and_can_be_keys() -> None:
    listed = Cluster([[0, 1], [2]], WIRE, WIRE)  # type: ignore[arg-type]
    assert listed == Cluster(((0, 1), (2,)), WIRE, WIRE)
    assert len({listed, Cluster(((0, 1), (2,)), WIRE, WIRE)}) == 1
