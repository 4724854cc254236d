"""Who takes part in a round: what they get, what it is named, and the channels that it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transits import CPU, open_exchange, world

import gradsync as gs
from gradsync.exchange.flat import Form
from gradsync.exchange.participants import AllRanks, Leaders, Participants, WithinHosts
from gradsync.exchange.sender import GradientExchange
from gradsync.transport.groups import ACROSS_HOSTS, WITHIN_HOST
from gradsync.transport.host_meeting import declare_host


def channels(across: bool, hosts: str) -> list[str]:
    """Of those that only across_hosts uses, what a few steps have made on this rank."""
    declare_host(hosts[dist.get_rank()])
    try:
        model = torch.nn.Linear(64, 64)
        compress = gs.across_hosts(gs.int8()) if across else gs.int8()
        sync = gs.attach(model, torch.optim.SGD(model.parameters(), 0.1), gs.Plan(compress=compress))
        for _ in range(3):
            model(torch.randn(4, 64)).sum().backward()
        made = [name for name in (ACROSS_HOSTS, WITHIN_HOST) if name in sync._lane.groups.data]
        sync.detach()
        return made
    finally:
        declare_host(None)


def test_channels_across_hosts_are_made_only_for_what_travels_across_hosts_only(run: Any) -> None:
    assert run(channels, False, "ab") == [[], []]
    assert run(channels, True, "ab") == [[ACROSS_HOSTS], [ACROSS_HOSTS]]


def take_part(exchange: GradientExchange, who: Participants, ranks: list[int]) -> None:
    """A round of each kind among these ranks."""
    lane, me, size = exchange.lane, ranks.index(dist.get_rank()), len(ranks)
    assert (who.rank, who.size) == (me, size)
    flat = who.for_sums(Form(5, torch.float64, CPU)).add_(dist.get_rank())
    summed = who.sum(flat, 3)
    lane.wait(summed)
    assert flat.tolist() == [sum(ranks)] * 5
    rows, parts, theirs = (torch.zeros(size, 16, dtype=torch.uint8) for _ in range(3))
    rows[me] = ranks[me] + 1
    gathered = who.gather(rows, 3)
    lane.wait(gathered)
    assert rows.tolist() == [[rank + 1] * 16 for rank in ranks]
    parts += 10 * me + torch.arange(size, dtype=torch.uint8).view(size, 1)
    traded = who.trade(theirs, parts, 3)
    lane.wait(traded)
    assert theirs.tolist() == [[10 * other + me] * 16 for other in range(size)]
    for pending, tensor in ((summed, flat), (gathered, rows), (traded, theirs)):
        assert (pending.bucket, pending.nbytes) == (3, tensor.nbytes)


def be_everybody(hosts: str) -> None:
    exchange = open_exchange(gs.Plan(gs.native()), hosts)
    take_part(exchange, AllRanks(exchange.lane, exchange.exact), list(range(len(hosts))))


def be_leaders(hosts: str) -> float:
    exchange = open_exchange(gs.Plan(gs.native()), hosts)
    leaders = Leaders(exchange.lane, world(), CPU)
    leaders.open()
    if leaders.rank >= 0:
        take_part(exchange, leaders, [hosts.index(host) for host in sorted(set(hosts))])
    return leaders.sum_share(Form(5, torch.float32, CPU))


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abcb"])
def test_everybody_adds_up_gathers_and_trades(hosts: str, run: Callable[..., Any]) -> None:
    run(be_everybody, hosts, ranks=len(hosts))


@pytest.mark.parametrize("hosts", ["ab", "aab", "abcb"])
def test_the_first_rank_of_each_host_adds_up_gathers_and_trades_and_sends_as_much_as_any_of_so_many(
    hosts: str, run: Callable[..., Any]
) -> None:
    shares, size = run(be_leaders, hosts, ranks=len(hosts)), len(set(hosts))
    assert sum(shares) == pytest.approx(2 * (size - 1))  # what any sum over so many sends at least
    speakers = {hosts.index(host) for host in hosts}
    assert {share for rank, share in enumerate(shares) if rank not in speakers} <= {0.0}
    assert len({share for rank, share in enumerate(shares) if rank in speakers}) == 1


def be_within_hosts(hosts: str, has_library: bool) -> bool:
    """Whether there is a channel for it."""
    exchange = open_exchange(gs.Plan(gs.native()), hosts, has_library)
    within_hosts = WithinHosts(exchange.lane, world(), CPU, True)
    within_hosts.open()
    flat, rank = torch.full((5,), float(dist.get_rank() + 1), dtype=torch.float64), dist.get_rank()
    pending = within_hosts.sum(flat, 3)
    assert (pending is None) == (hosts.count(hosts[rank]) == 1)
    if pending is not None:
        exchange.lane.wait(pending)
        assert (pending.bucket, pending.nbytes) == (3, flat.nbytes)
    assert flat.tolist() == [sum(other + 1 for other, host in enumerate(hosts) if host == hosts[rank])] * 5
    return WITHIN_HOST in exchange.lane.groups.data


@pytest.mark.parametrize("hosts", ["ab", "aab", "abab"])
def test_the_ranks_of_a_host_add_up_in_memory_or_over_a_channel_of_their_own(
    hosts: str, run: Callable[..., Any]
) -> None:
    assert not any(run(be_within_hosts, hosts, True, ranks=len(hosts)))
    assert all(run(be_within_hosts, hosts, False, ranks=len(hosts))) == (hosts != "ab")
