"""Runs any schedule over a channel's sends and receives, in place: the station between an algorithm and the wire.

    Schedule ──▶ Program.compile ──▶ Program: what this rank does ──▶ run ──▶ Channel.send, Channel.recv
    (for all ranks; pure)            (pure, kept and used again)      (blocks, on a flat tensor)

A round on the host, cut into pieces p0, p1 …; a piece is added while the next one travels:

    post     receives  r0 r1 r2, those of the next round   sends s0 s1 s2
    wire               ├──p0──┼──p1──┼──p2──┤
    add                       ├p0┤   ├p1┤   ├p2┤
    post                         the next round's sends, each as soon as all it reads is there

Additions land in scratch first, as large as the largest round needs; rounds take turns with two of them. A copy
lands in its place, unless this rank uses that place in the same round or in the one before: then it lands in
scratch too.

Note [Before the round]
    A transfer reads what its sender held before the round, but a send reads memory until it is done. So what
    lands in scratch is put in its place only when the sends that read there are done. Every rank posts all
    receives of a round before it waits for anything, so such a send never depends on our own progress.

Note [Early receives]
    Gloo sends nothing before it has heard from the other side that a receive is posted. Posted only when its round
    begins, every round would first wait for that word to cross, behind whatever else leaves the host. So receives
    are posted a round ahead, before the sends; what could meet the round before lands in scratch.

Note [Ahead]
    The last piece of a round would leave the wire idle until it is added and the next round begins. So a send of
    the next round leaves as soon as the arrivals that touch its range are in place, in the order of the program:
    messages of one pair and round must keep it.

Note [Agreement]
    Sender and receiver never talk about what a message holds. `_messages` makes all messages of a round from
    the schedule, alike on every rank; a rank takes those it sends or receives, in that order. Those of one pair
    share a tag, and the transport keeps their order.

Numbers are added by torch in the tensor's own type, so half types round at every hop and integers wrap around.
An error of the backend comes out as it is, a RuntimeError; the group's own timeout bounds every wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch.distributed import Work

from gradsync.algorithms.schedule import Round, Schedule, chunk_bounds
from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.groups import Channel
from gradsync.transport.nccl_channel import NcclChannel

PIECE_NBYTES = 1 << 20
_ROUND_BITS, _BUCKET_BITS, _SYNC_BITS = 10, 11, 10  # 31 in all: a tag is a non-negative C int


class Message(NamedTuple):
    """Elements `start` to `stop`, from one rank to another, which adds them to its own or puts them in their place."""

    src: int
    dst: int
    start: int
    stop: int
    add: bool

    def meets(self, other: Message) -> bool:
        """Return whether the two have elements in common."""
        return self.start < other.stop and other.start < self.stop


class Arrival(NamedTuple):
    """A message that this rank receives."""

    message: Message
    scratch: int | None  # where in scratch it lands; None: at once in its place
    after: int  # how many of the step's sends must be done before it goes from scratch to its place


class RoundPart(NamedTuple):
    """This rank's part in one round."""

    number: int  # the round's, from 0
    sends: tuple[Message, ...]
    arrivals: tuple[Arrival, ...]  # in the order in which they are put in their places
    ready: tuple[int, ...]  # per send: how many arrivals of the step before must be in place; never falls


@dataclass(frozen=True, slots=True)
class Program:
    """The work of one rank in each round, for tensors of one size; made by `compile`."""

    rank: int
    numel: int
    itemsize: int
    scratch_numel: int
    steps: tuple[RoundPart, ...]  # without the rounds in which this rank has nothing to do

    @classmethod
    def compile(
        cls, schedule: Schedule, rank: int, numel: int, itemsize: int, piece_nbytes: int = PIECE_NBYTES
    ) -> Program:
        """Return this rank's part of a schedule, which may be only a part of an all-reduce.

        Chunks that follow each other from one rank to another are one message. Messages are cut into pieces, none
        below `piece_nbytes` unless the whole message is. All ranks must compile with equal arguments, `rank` apart.

        >>> from gradsync.algorithms.ring import ring
        >>> first, second = Program.compile(ring().schedule(2), 0, 10, 4).steps
        >>> first.sends, first.arrivals[0].message
        ((Message(src=0, dst=1, start=5, stop=10, add=True),), Message(src=1, dst=0, start=0, stop=5, add=True))
        """
        if not 0 <= rank < schedule.world_size:
            raise ValueError(f"rank must be one of the schedule's {schedule.world_size} ranks, got {rank}")
        if itemsize < 1 or piece_nbytes < 1:
            raise ValueError(f"itemsize and piece_nbytes must be at least 1 byte, got {itemsize} and {piece_nbytes}")
        bounds = chunk_bounds(numel, schedule.num_chunks)
        shortest = -(-piece_nbytes // itemsize)
        every = ((n, _of_rank(rank, _messages(r, bounds))) for n, r in enumerate(schedule.rounds))
        busy = [(number, messages) for number, messages in every if messages]
        steps: list[RoundPart] = []
        for number, messages in busy:
            steps.append(_step(number, messages, rank, shortest, steps[-1] if steps else None))
        return cls(rank, numel, itemsize, max(map(_scratch_numel, steps), default=0), tuple(steps))


def stamp(sync: int, bucket: int) -> int:
    """Marks the messages of one bucket's round trip, so that those of another never match them.

    A tag has 31 bits, each number modulo what its bits hold. A run adds the round to the stamp.

        30 ···· 21  20 ····· 10  9 ···· 0
        sync        bucket       round

    >>> hex(stamp(sync=1, bucket=2)), stamp(sync=1024, bucket=2048)
    ('0x200800', 0)
    """
    return (sync % (1 << _SYNC_BITS) << _BUCKET_BITS | bucket % (1 << _BUCKET_BITS)) << _ROUND_BITS


def run(program: Program, flat: torch.Tensor, channel: Channel, stamp: int) -> None:
    """Run the program on `flat`, in place; every member of the channel runs its own with the same stamp.

    Returns when `flat` holds the outcome (nccl: when the current stream will, once it comes to it).
    """
    _refuse_misfit(program, flat, channel)
    flat = flat.detach()
    if channel.on_host:
        _run_on_host(program, flat, channel, stamp)
    else:
        _run_on_stream(program, flat, channel)


def _refuse_misfit(program: Program, flat: torch.Tensor, channel: Channel) -> None:
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"run takes a contiguous tensor of one dimension, got shape {tuple(flat.shape)}")
    if (flat.numel(), flat.element_size()) != (program.numel, program.itemsize):
        raise ValueError(
            f"the program was compiled for {program.numel} elements of {program.itemsize} bytes, "
            f"got {flat.numel()} of {flat.element_size()}"
        )
    if channel.on_host and flat.device.type != "cpu":
        raise ValueError(f"gloo sends and receives tensors in host memory, got one on {flat.device}; copy it there")


# Running a step


def _run_on_host(program: Program, flat: torch.Tensor, channel: GlooChannel, stamp: int) -> None:
    scratch, spare = flat.new_empty(2, program.scratch_numel)
    posted: list[Work] = []
    sending = _Sending(program.steps[0], flat, channel, stamp) if program.steps else None
    for step, following in zip_longest(program.steps, program.steps[1:]):
        assert sending is not None
        # Receives first: what a peer sends to a posted one goes straight to its place.
        arriving = posted or _post(step, flat, scratch, channel, stamp)
        posted = _post(following, flat, spare, channel, stamp) if following else []
        sending.launch()
        ahead = _Sending(following, flat, channel, stamp) if following else None
        for done, (arrival, work) in enumerate(zip(step.arrivals, arriving, strict=True), 1):
            work.wait()
            sending.wait(arrival.after)  # see [Before the round]
            _put(arrival, flat, scratch)
            if ahead:
                ahead.launch(done)
        sending.wait(len(step.sends))
        scratch, spare, sending = spare, scratch, ahead


class _Sending:
    """The sends of one step, in order: launched as soon as what they read is there, see [Ahead]."""

    def __init__(self, step: RoundPart, flat: torch.Tensor, channel: GlooChannel, stamp: int) -> None:
        self._step, self._flat, self._channel = step, flat, channel
        self._tag = _tag(stamp, step)
        self._works: list[Work] = []
        self._num_waited = 0

    def launch(self, num_arrived: int | None = None) -> None:
        """Launch those that need no more than so many arrivals of the step before; None: all."""
        for need, message in zip(
            self._step.ready[len(self._works) :], self._step.sends[len(self._works) :], strict=True
        ):
            if num_arrived is not None and need > num_arrived:
                return
            part = self._flat[message.start : message.stop]
            self._works.append(self._channel.send(_raw(part), message.dst, self._tag))

    def wait(self, count: int) -> None:
        """Wait until the first `count` are done."""
        for work in self._works[self._num_waited : count]:
            work.wait()
        self._num_waited = max(self._num_waited, count)


def _post(step: RoundPart, flat: torch.Tensor, scratch: torch.Tensor, channel: GlooChannel, stamp: int) -> list[Work]:
    return [channel.recv(_raw(_landing(a, flat, scratch)), a.message.src, _tag(stamp, step)) for a in step.arrivals]


def _run_on_stream(program: Program, flat: torch.Tensor, channel: NcclChannel) -> None:
    """Run every round as one batch; everything after it is after its sends too."""
    scratch = flat.new_empty(program.scratch_numel)
    for step in program.steps:
        channel.batch(flat.device, partial(_issue, step, flat, scratch, channel))
        for arrival in step.arrivals:
            _put(arrival, flat, scratch)


def _issue(step: RoundPart, flat: torch.Tensor, scratch: torch.Tensor, channel: NcclChannel) -> None:
    for a in step.arrivals:
        channel.recv(_landing(a, flat, scratch), a.message.src)
    for m in step.sends:
        channel.send(flat[m.start : m.stop], m.dst)


def _tag(stamp: int, step: RoundPart) -> int:
    return stamp | step.number % (1 << _ROUND_BITS)


def _raw(part: torch.Tensor) -> torch.Tensor:
    """A part as bytes: a backend need not know the type of what it carries."""
    return part.view(torch.uint8)


def _landing(arrival: Arrival, flat: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    start, stop = arrival.message.start, arrival.message.stop
    if arrival.scratch is None:
        return flat[start:stop]
    return scratch[arrival.scratch : arrival.scratch + stop - start]


def _put(arrival: Arrival, flat: torch.Tensor, scratch: torch.Tensor) -> None:
    if arrival.scratch is not None:
        landed, place = _landing(arrival, flat, scratch), flat[arrival.message.start : arrival.message.stop]
        (place.add_ if arrival.message.add else place.copy_)(landed)


# Compiling a round


def _messages(transfers: Round, bounds: Sequence[tuple[int, int]]) -> list[Message]:
    """The messages of a round, in an order that keeps the listed one for every chunk; see [Agreement]."""
    found: list[Message] = []
    newest: dict[tuple[int, int], int] = {}  # by pair: its last message, which may grow
    latest: dict[tuple[int, int], int] = {}  # by receiver and chunk: the last message that changes it
    for t in transfers:
        start, stop = bounds[t.chunk]
        if start == stop:
            continue
        index = newest.get((t.src, t.dst), -1)
        follows = index >= 0 and (found[index].stop, found[index].add) == (start, t.add)
        # A message that comes later in the order may not be overtaken by growing an earlier one.
        if follows and latest.get((t.dst, t.chunk), -1) < index:
            found[index] = found[index]._replace(stop=stop)
        else:
            index = newest[t.src, t.dst] = len(found)
            found.append(Message(t.src, t.dst, start, stop, t.add))
        latest[t.dst, t.chunk] = index
    return found


def _cut(message: Message, shortest: int) -> Iterator[Message]:
    """Equal pieces, as many as can have `shortest` elements or more."""
    start, numel = message.start, message.stop - message.start
    for low, high in chunk_bounds(numel, max(1, numel // shortest)):
        yield message._replace(start=start + low, stop=start + high)


def _of_rank(rank: int, messages: list[Message]) -> list[Message]:
    return [message for message in messages if rank in (message.src, message.dst)]


def _step(number: int, messages: list[Message], rank: int, shortest: int, before: RoundPart | None) -> RoundPart:
    sends = [piece for message in messages if message.src == rank for piece in _cut(message, shortest)]
    incoming = [message for message in messages if message.dst == rank]
    busy = [] if before is None else [*before.sends, *(arrival.message for arrival in before.arrivals)]
    arrivals = tuple(_arrivals(incoming, sends, busy, shortest))
    return RoundPart(number, tuple(sends), arrivals, _ready(sends, () if before is None else before.arrivals))


def _ready(sends: list[Message], before: tuple[Arrival, ...]) -> tuple[int, ...]:
    """Return how many of the arrivals before it each send needs; one never leaves before an earlier one."""
    needs = (max((n for n, a in enumerate(before, 1) if a.message.meets(send)), default=0) for send in sends)
    return tuple(accumulate(needs, max))


def _arrivals(incoming: list[Message], sends: list[Message], before: list[Message], shortest: int) -> Iterator[Arrival]:
    used = 0
    for index, message in enumerate(incoming):
        # Messages are few and pieces are many: compare pieces only where whole messages meet.
        readers = [(count, send) for count, send in enumerate(sends, 1) if send.meets(message)]
        alone = not any(message.meets(other) for other in incoming[:index] + incoming[index + 1 :])
        clear = not any(message.meets(other) for other in before)
        in_place = not message.add and not readers and alone and clear
        for piece in _cut(message, shortest):
            after = max((count for count, send in readers if send.meets(piece)), default=0)
            yield Arrival(piece, None if in_place else used, after)
            used += 0 if in_place else piece.stop - piece.start


def _scratch_numel(step: RoundPart) -> int:
    return sum(a.message.stop - a.message.start for a in step.arrivals if a.scratch is not None)
