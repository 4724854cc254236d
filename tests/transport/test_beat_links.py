"""Links between speakers: messages arrive, tokens come past the interpreter, an end is noticed, closing is quick."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.plan.guard import Guard
from gradsync.transport import beat_links
from gradsync.transport.beat_links import BeatLinks, Neighbour
from gradsync.transport.groups import Groups, group_of
from gradsync.transport.host_meeting import declare_host
from gradsync.transport.lane import open_lane
from gradsync.transport.notable_ranks import SUMMARY_NBYTES

NUM_TOKENS = 5


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def text(number: int) -> bytes:
    return number.to_bytes(8, "little").ljust(SUMMARY_NBYTES, b".")


def link_up() -> tuple[Groups, BeatLinks, int]:
    """Two ranks' links over a channel of their own."""
    assert dist.group.WORLD is not None
    groups = group_of(dist.group.WORLD)
    groups.add_control()
    other = 1 - groups.rank
    return groups, BeatLinks([Neighbour(other, groups.control, other, True)], NUM_TOKENS), other


def part(groups: Groups, links: BeatLinks) -> bool:
    """Close both ends; whether the other's end was noticed, with what it had said before."""
    dist.barrier()
    if groups.rank == 0:
        links.send([(1, text(9))], at_once=True)
        del links
        groups.close()
        dist.barrier()
        return True
    dist.barrier()
    said: list[bytes] = []
    while links.closed() != [0]:
        links.send([(0, text(0))])
        said += [message for _, message in links.hear()]
    del links
    groups.close()
    return said[-1:] == [text(9)]


def talk() -> tuple[list[int], bool]:
    groups, links, other = link_up()
    heard: list[int] = []
    for number in range(1, 100):
        links.send([(other, text(number))])
        while not heard or heard[-1] < number:
            heard += [int.from_bytes(message[:8], "little") for _, message in links.hear()]
    return heard, part(groups, links)


def test_messages_arrive_once_and_in_order(run: Callable[..., Any]) -> None:
    """Of two that came together only the newer one counts."""
    for heard, noticed in run(talk):
        assert heard == sorted(set(heard))
        assert heard[-1] == 99
        assert noticed


def talk_to_the_deaf() -> tuple[int, list[int]]:
    """Rank 1 does not listen for a while: what it hears then is the newest, and rank 0 keeps little."""
    groups, links, other = link_up()
    heard: list[int] = []
    if groups.rank == 0:
        for number in range(1, 201):
            links.send([(other, text(number))])
    kept = len(links._links[other]._sent)
    dist.barrier()
    while groups.rank == 1 and (not heard or heard[-1] < beat_links._UNHEARD):
        heard += [int.from_bytes(message[:8], "little") for _, message in links.hear()]
    dist.barrier()
    del links
    groups.close()
    return kept, heard


def test_who_does_not_listen_is_sent_less(run: Callable[..., Any]) -> None:
    (kept, _), (_, heard) = run(talk_to_the_deaf)
    assert kept == beat_links._UNHEARD + (200 - beat_links._UNHEARD) // beat_links._SLOWER
    assert heard == sorted(set(heard))


def ask() -> tuple[int, bool]:
    """Rank 0 asks; rank 1 does nothing at all meanwhile, in Python."""
    groups, links, other = link_up()
    if groups.rank == 1:
        links.restock()
    dist.barrier()
    taken = 0
    if groups.rank == 0:
        for _ in range(NUM_TOKENS):
            links.ask([other])
            links.ask([other])  # one at a time
            until(lambda: links.vouched() == [other])
            taken += 1
        links.ask([other])
        assert links.vouched() == []  # there are no more
        links.send([(other, text(1))])
    dist.barrier()
    if groups.rank == 1:
        until(lambda: dict(links.hear()))
        links.restock()
    else:
        until(lambda: links.vouched() == [other])
    return taken, part(groups, links)


def test_tokens_come_without_the_interpreter_and_are_replaced(run: Callable[..., Any]) -> None:
    for (taken, noticed), expected in zip(run(ask), [NUM_TOKENS, 0], strict=True):
        assert (taken, noticed) == (expected, True)


@pytest.mark.parametrize("value", [b"", b"\0" * 100, os.urandom(4000)])
def test_a_buffer_that_holds_no_frame_is_not_read(value: bytes) -> None:
    channel: Any = type("Deaf", (), {"recv": lambda *_: None})()
    inbox = beat_links._Inbox(Neighbour(1, channel, 1, True), 4000, 1)
    inbox._tensor[: len(value)] = torch.frombuffer(bytearray(value) or bytearray(1), dtype=torch.uint8)[: len(value)]
    assert inbox.content() is None


def come_and_go() -> tuple[int, list[str], float]:
    """Descriptors that are left of a lane across hosts, threads that are, and how long closing took."""
    assert dist.group.WORLD is not None
    declare_host(f"h{dist.get_rank() % 2}")
    threads = set(threading.enumerate())
    try:
        for turn in range(2):
            lane = open_lane(dist.group.WORLD, Guard(), 60)
            dist.barrier()
            begin = time.monotonic()
            lane.close(together=True)
            took = time.monotonic() - begin
            del lane
            dist.barrier()
            if turn == 0:  # the first opens what stays, such as the interface that gloo found
                before = len(os.listdir("/proc/self/fd"))
    finally:
        declare_host(None)
    # The thread that wrote to the store ends by itself.
    until(lambda: not [t for t in set(threading.enumerate()) - threads if t.name.startswith("gradsync")])
    return len(os.listdir("/proc/self/fd")) - before, [t.name for t in set(threading.enumerate()) - threads], took


def test_a_lane_across_hosts_leaves_nothing_behind(run: Callable[..., Any]) -> None:
    for more, threads, took in run(come_and_go, ranks=3):
        assert more <= 0
        assert threads == []
        assert took < 10  # no wait for what is still posted
