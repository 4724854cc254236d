"""Senders: what they keep for a bucket outlives the bucket, and what they say of the network is what is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transits import CPU, bucket_of, open_exchange, random, travel, world

import gradsync as gs
from gradsync.compress.recipe import EXACT
from gradsync.exchange.flat import FlatBucket
from gradsync.exchange.residuals import KeptState, begin
from gradsync.exchange.sender import GradientExchange, Sender, main_device, travelling_devices


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


def wait_for_buckets() -> None:
    """Before compression begins, and while nothing is there to compress."""
    exchange, rank = open_exchange(gs.Plan(compress=gs.powersgd(2)), "aa"), dist.get_rank()
    sender, bucket = exchange.sender, bucket_of(exchange, 0, a=random(rank, 32, 16), b=random(rank, 16, 32))
    first = begin([bucket])
    sender.prepare([bucket], compress=False)
    assert_same(sender.kept(), first)
    assert bucket.residual is None
    before = bucket.flat.clone()
    travel(exchange, bucket)
    assert torch.equal(bucket.flat, sum_over_ranks(before)), "it goes as it is"
    sender.prepare([bucket], compress=True)
    assert_same(sender.kept(), first)
    travel(exchange, bucket)
    assert sender.kept().residuals["a"].any()
    sender.replace(KeptState({}, {}))
    assert_same(sender.kept(), KeptState({}, {}))
    sender.expect([bucket_of(exchange, 1, a=torch.zeros(32, 16))])
    assert sender.waiting == ["a"]
    assert_same(sender.kept(), KeptState({"a": first.residuals["a"]}, {"a": first.factors["a"]}))


def sum_over_ranks(mine: torch.Tensor) -> torch.Tensor:
    total = mine.clone()
    dist.all_reduce(total)
    return total


def test_what_is_kept_before_compression_begins_is_what_it_begins_with(run: Any) -> None:
    run(wait_for_buckets)


def scale_what_is_kept() -> None:
    exchange, rank = open_exchange(gs.Plan(compress=gs.powersgd(2)), "aa"), dist.get_rank()
    sender = exchange.sender
    here = bucket_of(exchange, 0, a=random(rank, 32, 16))
    gone = bucket_of(exchange, 1, b=random(rank, 16, 32))
    sender.add([here, gone])
    travel(exchange, here, gone)
    sender.remove([gone])
    before = sender.kept()
    assert all(residual.any() for residual in before.residuals.values())
    for factor in (1.0, 2.0, 0.25):
        sender.rescale(factor)
    after = sender.kept()
    assert_same(after, KeptState({name: each * 0.5 for name, each in before.residuals.items()}, before.factors))


def test_residuals_follow_the_scale_of_the_gradients_wherever_they_wait(run: Any) -> None:
    run(scale_what_is_kept)


def begin_late(exact_steps: int) -> list[bool]:
    """Whether each step was exact."""
    plan = gs.Plan(compress=gs.warmup(gs.error_feedback(gs.bf16()), exact_steps))
    exchange, rank = open_exchange(plan, "aa"), dist.get_rank()
    found = []
    for step in range(4):
        bucket = bucket_of(exchange, 0, weight=random(rank, 64))
        exchange.sender.prepare([bucket], compress=True)
        before = bucket.flat.clone()
        travel(exchange, bucket)
        found.append(torch.equal(bucket.flat, sum_over_ranks(before)))
        assert bool(exchange.sender.tally.codecs.get("bf16", None)) is True
        assert exchange.sender.tally.codec("bf16").steps == max(0, step + 1 - exact_steps)
        exchange.lane.session.next_step()
    return found


def test_a_warm_up_is_exact_for_just_so_many_steps_and_counts_none_of_them(run: Any) -> None:
    for exact_steps in (1, 2):
        assert run(begin_late, exact_steps) == [[step < exact_steps for step in range(4)]] * 2


def audit_some(every: int) -> list[int | None]:
    """The step of the last audit, after each step; its numbers are those of these gradients."""
    plan = gs.Plan(compress=gs.int8(), audit_every=every)
    exchange, rank, found = open_exchange(plan, "aa"), dist.get_rank(), list[Any]()
    for step in range(5):
        bucket = bucket_of(exchange, 0, weight=random(10 * step + rank, 2048))
        exchange.sender.prepare([bucket], compress=True)
        exact = sum_over_ranks(bucket.flat)
        travel(exchange, bucket)
        stats = exchange.sender.tally.stats()
        found.append(stats.get("audit_step"))
        if found[-1] == step:
            error = float((bucket.flat - exact).double().norm() / exact.double().norm())
            assert stats["audit_error"] == pytest.approx(error, rel=1e-4)
            assert error > 0
        exchange.lane.session.next_step()
    return found


def test_every_so_many_steps_compression_is_compared_with_the_exact_sum(run: Any) -> None:
    assert run(audit_some, 2) == [[0, 0, 2, 2, 4]] * 2
    assert run(audit_some, 3) == [[0, 0, 0, 3, 3]] * 2


def count_what_is_sent() -> None:
    exchange, rank = open_exchange(gs.Plan(gs.native(), gs.bf16()), "ab"), dist.get_rank()
    bucket = bucket_of(exchange, 0, weight=random(rank, 100), bias=random(rank, 3))
    exchange.sender.prepare([bucket], compress=True)
    for _ in range(2):
        pending = exchange.sender.launch(bucket)
        assert (pending.what, pending.nbytes, pending.bucket) == ("bucket 0", 206, 0)
        exchange.sender.flush()
        exchange.lane.wait(pending)
        assert [span.what for span in bucket.spans] == ["encode_s", "decode_s"], "those of this step"
        exchange.lane.session.next_step()
    tally = exchange.sender.tally.codec("bf16")
    assert (tally.way, tally.steps, tally.raw_nbytes, tally.payload_nbytes) == ("native", 2, 2 * 412, 2 * 206)
    assert tally.sent_nbytes == 2 * exchange.sender.sent_nbytes(bucket, 0) > 0


def test_what_compression_sends_is_counted_step_by_step(run: Any) -> None:
    run(count_what_is_sent)


def choose_for(plan: gs.Plan, hosts: str) -> tuple[bool, str]:
    sender = open_exchange(plan, hosts).sender
    [item] = bucket_of_one(sender).items
    return sender.goes_in_rounds, sender.choose(item.param).label


def bucket_of_one(sender: Sender) -> FlatBucket:
    exchange = GradientExchange(sender._lane, sender._exact, sender)
    return bucket_of(exchange, 0, weight=torch.zeros(64, 32))


@pytest.mark.parametrize(
    ("plan", "hosts", "expected"),
    [
        (gs.Plan(), "aa", (False, "exact")),
        (gs.Plan(compress=gs.int8()), "aa", (True, "int8")),
        (gs.Plan(compress=gs.int8()), "a", (False, "exact")),  # one rank has nobody to send to
        (gs.Plan(compress=gs.across_hosts(gs.int8())), "aa", (True, "exact")),  # nothing crosses
        (gs.Plan(compress=gs.across_hosts(gs.int8())), "ab", (True, "int8")),
    ],
)
def test_what_has_nowhere_to_go_is_not_compressed(
    plan: gs.Plan, hosts: str, expected: tuple[bool, str], run: Any
) -> None:
    assert run(choose_for, plan, hosts, ranks=len(hosts)) == [expected] * len(hosts)


def compress_alone() -> None:
    """As who measures a compressor on one rank."""
    exchange = open_exchange(gs.Plan(), "a")
    sender = Sender(exchange.lane, world(), exchange.exact, gs.Plan(compress=gs.sign()), CPU, on_one_rank=True)
    assert sender.goes_in_rounds
    alone = GradientExchange(exchange.lane, exchange.exact, sender)
    bucket = bucket_of(alone, 0, weight=random(0, 64, 32))
    before = bucket.flat.clone()
    sender.add([bucket])
    travel(alone, bucket)
    assert not torch.equal(bucket.flat, before)


def test_one_rank_compresses_if_it_is_told_to(run: Any) -> None:
    run(compress_alone, ranks=1)


def launch_another_of_the_same_number() -> None:
    """As after a new layout: the memory that was summed before is not touched again."""
    exchange = open_exchange(gs.Plan(), "aa")
    first = bucket_of(exchange, 0, a=torch.ones(3))
    second = bucket_of(exchange, 0, b=torch.ones(5))
    for bucket, expected in ((first, 2.0), (first, 4.0), (second, 2.0)):
        travel(exchange, bucket)
        assert set(bucket.items[0].of(bucket.flat).tolist()) == {expected}
    assert first.items[0].of(first.flat).tolist() == [4.0] * 3
    assert bucket_of(exchange, 1, c=torch.ones(1)).choice == replace(EXACT)


def test_a_bucket_is_summed_itself_and_not_the_one_that_had_its_number(run: Any) -> None:
    run(launch_another_of_the_same_number)


def test_gradients_are_where_a_gpu_is() -> None:
    gpus = [torch.device("cuda", index) for index in (1, 0)]
    assert main_device([CPU, *gpus]) == gpus[1]
    assert main_device([CPU]) == CPU
    assert main_device([]) == CPU


def devices_of(compress: bool) -> set[torch.device]:
    plan = gs.Plan(compress=gs.int8()) if compress else gs.Plan()
    return travelling_devices(world(), [torch.device("cuda", 0)], plan)


def test_payloads_of_a_gpu_go_through_the_host_on_gloo(run: Any) -> None:
    gpu = torch.device("cuda", 0)
    assert run(devices_of, False) == [{gpu}] * 2
    assert run(devices_of, True) == [{gpu, CPU}] * 2
