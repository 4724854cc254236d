"""Every neighbour is met once, nobody twice at a time, and who is slow is named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsync.probe.pairs import HostPair, rounds_of, slow_links


@given(st.integers(2, 40))
def test_every_link_of_the_ring_is_measured_once_and_alone(num_hosts: int) -> None:
    rounds = rounds_of(num_hosts)
    pairs = [frozenset(pair) for together in rounds for pair in together]
    ring = {frozenset((host, (host + 1) % num_hosts)) for host in range(num_hosts)}
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == ring
    for together in rounds:
        hosts = [host for pair in together for host in pair]
        assert len(hosts) == len(set(hosts))


@given(st.integers(3, 40), st.data())
def test_a_slow_host_is_named_and_nobody_else(num_hosts: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, num_hosts - 1))
    pairs = [HostPair(a, b, 1e8 if slow in (a, b) else 1e9) for together in rounds_of(num_hosts) for a, b in together]
    said = slow_links(pairs, "host {}".format)
    assert said == [f"host {slow}: 800 Mbit/s to its neighbours, the others have 8 Gbit/s"]


@given(st.integers(3, 40), st.floats(0.6, 1.0))
def test_links_that_are_nearly_alike_are_not_spoken_of(num_hosts: int, worst: float) -> None:
    pairs = [HostPair(a, b, 1e9) for together in rounds_of(num_hosts) for a, b in together]
    assert slow_links([pairs[0]._replace(bandwidth=worst * 1e9), *pairs[1:]], str) == []


def test_a_single_link_has_none_to_compare_with() -> None:
    assert slow_links([HostPair(0, 1, 1.0)], str) == []
