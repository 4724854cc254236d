"""Senders: what they keep for a bucket outlives the bucket, and what they say of the network is what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transits import bucket_of, open_exchange, random, travel

import gradsync as gs
from gradsync.exchange.residuals import KeptState


def assert_same(found: KeptState, expected: KeptState) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def take_away_and_bring_back() -> None:
    exchange, rank = open_exchange(gs.Plan(compress=gs.powersgd(2)), "aa"), dist.get_rank()
    sender = exchange.sender
    first = bucket_of(exchange, 0, a=random(rank, 32, 16), b=random(rank + 2, 16, 32))
    second = bucket_of(exchange, 1, c=random(rank + 4, 24, 24))
    sender.add([first])
    sender.add([second])
    travel(exchange, first, second)
    kept = sender.kept()
    for each in kept:
        assert set(each) == {"a", "b", "c"}
    sender.remove([second])
    assert_same(sender.kept(), kept)
    sender.remove([first])
    assert sender.waiting == ["a", "b", "c"]
    assert_same(sender.kept(), kept)
    sender.add([bucket_of(exchange, 2, c=torch.zeros(24, 24), b=torch.zeros(16, 32))])
    assert sender.waiting == ["a"]
    assert_same(sender.kept(), kept)
    sender.prepare([bucket_of(exchange, 3, a=torch.zeros(32, 16))], compress=True)
    assert sender.waiting == ["b", "c"]
    assert_same(sender.kept(), kept)


def test_what_is_kept_for_a_parameter_stays_whatever_buckets_come_and_go(run: Any) -> None:
    run(take_away_and_bring_back)


def ask_for_traffic(compressed: bool) -> tuple[int, str]:
    exchange, rank = open_exchange(gs.Plan(gs.native(), gs.int8()), "ab"), dist.get_rank()
    buckets = [bucket_of(exchange, i, **{f"p{i}": random(rank, 1 << (10 + i))}) for i in range(3)]
    exchange.sender.prepare(buckets, compressed)
    said = [exchange.sender.traffic([bucket]) for bucket in buckets]
    assert [nbytes for nbytes, _ in said] == [round(exchange.sender.sent_nbytes(bucket, 0)) for bucket in buckets]
    assert said[0][0] < said[1][0] < said[2][0]
    assert exchange.sender.traffic([]) == (0, "")
    whole = exchange.sender.traffic()
    assert whole[0] == sum(nbytes for nbytes, _ in said)
    assert {way for _, way in said} == {whole[1]}
    return whole


def test_the_traffic_of_all_buckets_is_that_of_each_together(run: Any) -> None:
    [(coded, way), other], [(plain, plain_way), plain_other] = run(ask_for_traffic, True), run(ask_for_traffic, False)
    assert (way, plain_way) == ("gather", "native")
    assert (coded, plain) == (other[0], plain_other[0])
    assert coded < plain / 3


def speak_for_a_host(hosts: str, has_library: bool) -> tuple[int, list[float]]:
    """Without the library the ranks of a host speak over a channel of their own."""
    plan, rank = gs.Plan(gs.native(), gs.across_hosts(gs.int8())), dist.get_rank()
    exchange = open_exchange(plan, hosts, has_library)
    bucket = bucket_of(exchange, 0, weight=random(rank, 64, 32))
    exchange.sender.add([bucket])
    travel(exchange, bucket)
    truth = torch.stack([random(other, 64, 32) for other in range(len(hosts))]).sum(0)
    found = bucket.items[0].of(bucket.flat)
    assert (found - truth).norm() <= 0.02 * truth.norm()
    assert not torch.allclose(found, truth), "compressed: something is lost"
    nbytes, way = exchange.sender.traffic()
    assert way == "across_hosts"
    return nbytes, bucket.flat.tolist()


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("hosts", ["ab", "aab", "abac"])
def test_across_hosts_only_the_first_rank_of_each_sends_and_all_get_the_same(
    hosts: str, has_library: bool, run: Any
) -> None:
    found = run(speak_for_a_host, hosts, has_library, ranks=len(hosts))
    assert all(values == found[0][1] for _, values in found)
    assert [nbytes > 0 for nbytes, _ in found] == [hosts.index(host) == rank for rank, host in enumerate(hosts)]
