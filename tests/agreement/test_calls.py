"""Ranks that are in different calls find out, all in one sentence with the way out; those in the same one go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.agreement.calls import Call, check_same_call, meet
from gradsync.agreement.header import Flag, Head, Headers, pack_header
from gradsync.engine.handle import GradSync
from gradsync.errors import JOIN

SAME = "every rank must call the same, in the same step"
WAYS_OUT = {
    (Call.SYNCHRONIZE, Call.VOTE): "enter `with sync.join():` on every rank",
    (Call.SYNCHRONIZE, Call.DETACH): JOIN,
    (Call.VOTE, Call.DETACH): JOIN,
    (Call.SYNCHRONIZE, Call.DRAIN): JOIN,
    (Call.VOTE, Call.DRAIN): JOIN,
    (Call.DETACH, Call.AVERAGE): "every rank must take equally many steps",
    (Call.DETACH, Call.NEIGHBOURS): "every rank must take equally many steps",
    (Call.DRAIN, Call.AVERAGE): SAME,
    (Call.DETACH, Call.DRAIN): SAME,
    (Call.SYNCHRONIZE, Call.LOAD): SAME,
    (Call.VOTE, Call.BROADCAST): SAME,
    (Call.SYNCHRONIZE, Call.AVERAGE): SAME,
    (Call.GATHER, Call.PLAN): SAME,
}


def heads(*calls: Call) -> Headers:
    made = [Head(3, 0, 0.0, 0, -1, 0, 0, bytes(8), call) for call in calls]
    return Headers(torch.stack([pack_header(head, bytearray(2)) for head in made]))


@pytest.mark.parametrize("calls", WAYS_OUT)
def test_two_calls_have_one_way_out(calls: tuple[Call, Call]) -> None:
    for one, two in (calls, calls[::-1]):
        with pytest.raises(gs.Disagreement) as said:
            check_same_call(heads(one, two), (0, 1))
        assert str(said.value).endswith("; " + WAYS_OUT[calls])


def test_the_first_rank_that_differs_is_named_as_the_world_knows_it() -> None:
    with pytest.raises(gs.Disagreement) as said:
        check_same_call(heads(Call.LOAD, Call.LOAD, Call.DETACH, Call.VOTE), (1, 3, 5, 7))
    assert str(said.value) == f"rank 1 is in load_state_dict() but rank 5 is in detach(); {SAME}"


@pytest.mark.parametrize("call", Call)
def test_ranks_in_the_same_call_go_on(call: Call) -> None:
    check_same_call(heads(call, call, call), (0, 1, 2))


def bring_words() -> list[tuple[bytes, int]]:
    sync, rank = attached(), dist.get_rank()
    words = meet(sync._lane, Call.GATHER, 2, bytes([rank] * 8), Flag.SHADOW if rank else Flag.NONE)
    sync.detach()
    return [(head.digest, head.flags) for head in words]


def test_every_rank_learns_what_each_brought(run: Any) -> None:
    assert run(bring_words) == [[(bytes(8), 0), (bytes([1] * 8), int(Flag.SHADOW))]] * 2


def part_ways() -> str:
    sync = attached()
    with pytest.raises(gs.Disagreement) as said:
        sync.broadcast() if dist.get_rank() else sync.load_state_dict(sync.state_dict())
    return str(said.value)


def test_calls_that_do_not_match_raise_the_same_on_every_rank(run: Any) -> None:
    assert (
        run(part_ways)
        == [f"rank 0 is in load_state_dict() but rank 1 is in broadcast() or the end of join(); {SAME}"] * 2
    )


def attached() -> GradSync:
    model = torch.nn.Linear(2, 2)
    return gs.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), gs.Plan())
