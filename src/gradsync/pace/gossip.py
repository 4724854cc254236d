"""Gossip: every rank steps by itself, then averages with a neighbour only, by push-sum.

    rank 0    step ┐    step ┐    step ┐           each gives half of what it holds to its receiver of the round,
                   ├──┐      ├──┐      ├──┐        keeps the other half, and adds what its sender gives to it
    rank 1    step ┘  ▼ step ┘  ▼ step ┘  ▼

A rank holds a weight ω, 1 at first, and x; its parameters are z = x / ω. They are all that is stored: x = ω·z, also
after a step of the optimizer, which sees z only. In an exchange

    give   x / 2, ω / 2      x ← x / 2 + what comes      ω ← ω / 2 + what comes      z ← x / ω

so Σ x and Σ ω over the ranks stay what they were, whoever sends to whom: that is what keeps the mean. Here each gets
from one and gives to one, so ω stays 1; it travels all the same, for it is what makes z right.

A rank waits for its neighbours of a round, which hear from theirs, and for nobody else: one that is slow now and then
is felt by those first, and by the others rounds later. Buffers and optimizers stay each rank's own. `drain()` makes the
exact mean Σ x / Σ ω on every rank, and all buffers rank 0's: a run ends with it, or else with as many models as ranks.

Who sends to whom in a round (`neighbours`):

    ring            0 ▶ 1 ▶ 2 ▶ 3 ▶ 0                  every round the same
    exponential     rank ▶ rank + 1, + 2, + 4, …       a stride of its own in each of ⌈log₂ n⌉ rounds, and again

In every round each rank sends to exactly one and receives from exactly one. On the ring a rank has heard of all others
after n − 1 rounds, but of the ranks of a host only the last sends to another one. With the exponential strides
⌈log₂ n⌉ rounds are enough, and where n is a power of two they make the exact mean.

Note [Neighbours first]
    Messages between two ranks have no header that all ranks see. Without a handshake one that is in an exchange would
    wait for one that is in `drain()`, and both forever. So before anything large travels neighbours tell each other
    what they are in, which round, and how much they bring. A header among all ranks would tell too, but gossip would
    then wait for the slowest of all in every exchange. So a rank tells only its neighbours of the round, both of them:
    who gives to it, and who gets from it. And it does so not only before an exchange, but before everything that all
    ranks do together, `detach()` for one: a neighbour that waits in an exchange hears that we are elsewhere. Both then
    raise, and the others see that they have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsync.agreement.calls import Call, check_same_call
from gradsync.agreement.header import Flag, Head, Headers, header_nbytes, pack_header
from gradsync.errors import Disagreement, NonFinite, listed
from gradsync.exchange.flat import FlatBucket
from gradsync.pace.after_step import AfterStep
from gradsync.pace.averages import finish_mean, first_nonfinite, launch_mean
from gradsync.pace.contract import PaceContext, SavedPace, Stats, numbers_in_state
from gradsync.plan import paces
from gradsync.plan.paces import Topology
from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.groups import HOST
from gradsync.transport.heartbeat import Phase
from gradsync.transport.lane import Lane


class Neighbours(NamedTuple):
    """The neighbours of one rank in one round, by index in the group."""

    receiver: int  # gets half of what we hold
    sender: int  # gives us half of what it holds

    @property
    def peers(self) -> list[int]:
        """Both neighbours, once each: of two ranks the other is both."""
        return sorted(set(self))


def neighbours(topology: Topology, rank: int, size: int, number: int) -> Neighbours:
    """The neighbours of `rank` in the round with this number, among at least two ranks.

    >>> neighbours("ring", 0, 8, number=5)
    Neighbours(receiver=1, sender=7)
    >>> [neighbours("exponential", 0, 8, number).receiver for number in range(4)]
    [1, 2, 4, 1]
    """
    stride = 1 if topology == "ring" else 1 << number % num_strides(size)
    return Neighbours((rank + stride) % size, (rank - stride) % size)


def num_strides(size: int) -> int:
    """Return how many strides the exponential topology has among so many ranks: ⌈log₂ size⌉, without rounding.

    >>> [num_strides(size) for size in (2, 3, 4, 5, 64)]
    [1, 2, 2, 3, 6]
    """
    return (size - 1).bit_length()


HANDSHAKE_TAG = 0


def handshake(
    lane: Lane, channel: GlooChannel, peers: Sequence[int], mine: Head, names: Sequence[str]
) -> dict[int, Head]:
    """Tell these members of the group where we are, and return where they are: in the same, or this raises.

    `names` are the parameters', for a head that tells of a NaN in one of them.
    """
    row = pack_header(mine, bytearray())
    rows = {peer: torch.empty(header_nbytes(0), dtype=torch.uint8, device="cpu") for peer in peers}

    def run() -> None:
        works = [channel.recv(rows[peer], peer, HANDSHAKE_TAG) for peer in peers]
        works += [channel.send(row, peer, HANDSHAKE_TAG) for peer in peers]
        for work in works:
            work.wait()

    lane.wait(lane.send(run, "the word of its neighbours", header_nbytes(0) * len(peers)))
    members = sorted([lane.groups.rank, *peers])  # all of them look in one order, and say the same
    rows[lane.groups.rank] = row
    headers = Headers(torch.stack([rows[member] for member in members]))
    ranks = tuple(lane.global_ranks(members))
    check_same_call(headers, ranks)
    _check_round(headers, ranks, lane)
    _check_finite(headers, ranks, names, lane)
    return dict(zip(members, headers.heads, strict=True))


def _check_round(headers: Headers, ranks: tuple[int, ...], lane: Lane) -> None:
    first = headers.heads[0].step
    for rank, head in zip(ranks, headers.heads, strict=True):
        if head.step != first:
            raise Disagreement(
                f"{lane.place()} rank {rank} is in round {head.step} of gossip and its neighbour, rank {ranks[0]}, in "
                f"{first}: they did not call backward equally often, or resumed from different checkpoints"
            )


def _check_finite(headers: Headers, ranks: tuple[int, ...], names: Sequence[str], lane: Lane) -> None:
    bad = [(rank, head.nonfinite) for rank, head in zip(ranks, headers.heads, strict=True) if head.nonfinite >= 0]
    if bad:
        lane.fail()  # the others are not told by a header
        raise NonFinite(
            f"{lane.place()} {listed([rank for rank, _ in bad])} would have sent NaN or Inf in {names[bad[0][1]]}; no "
            "neighbour has taken it: go back to the last checkpoint"
        )


_CHANNEL = "gossip"
_PAYLOAD_TAG = HANDSHAKE_TAG + 1


class GossipPace(AfterStep):
    """`gossip(topology)` at work."""

    def __init__(self, pace: paces.Gossip, context: PaceContext) -> None:
        """Every rank makes it at once, with equal parameters."""
        groups = context.lane.groups
        self._pace = pace
        super().__init__(context)
        self._params = self._trained.params
        self._alone = groups.size == 1
        # Gloo, on whatever the parameters' own group is: messages go through host memory.
        groups.add_part(context.parent, _CHANNEL, list(range(groups.size)), HOST)
        self._channel = groups.gloo(_CHANNEL)
        self._flat_set = context.flat_set(self._trained.named)
        self._flat_part = self._flat_set.flat_parts[0]
        self._round = 0
        self._weight = 1.0  # ω
        self._diverged = False  # whether replicas may differ
        self._num_exchanges = 0
        self._distance: float | None = None

    @property
    def replicas_equal(self) -> bool:
        return not self._diverged

    def after_backward(self, count: int, aborted: int) -> bool:
        self._diverged = not self._alone
        return super().after_backward(count, aborted)

    def _is_time(self) -> bool:
        return not self._alone and self._clock % self._pace.every == 0

    def before_meeting(self, call: Call) -> None:
        """Tell the neighbours first: see [Neighbours first]."""
        if self._due:
            self._act()
        if not self._alone:
            self._handshake(call)

    def drain(self) -> bool:
        if self._due:
            self._act()
        if self._diverged:
            self._average()
        return False

    # What travels

    @torch.no_grad()
    def _act(self) -> None:
        lane, recorder = self._context.lane, self._context.recorder
        self._due.clear()
        lane.at(Phase.SYNCHRONIZING)
        recorder.start_waiting(on_device=False)
        begun = time.perf_counter()
        kept = self._weight / 2
        self._pack(kept)
        checks = self._context.guard.nonfinite != "allow"
        heads = self._handshake(Call.NEIGHBOURS, kept, first_nonfinite(self._flat_part) if checks else -1)
        brought = heads[self._neighbours().sender].weight
        gaps, norms = zip(
            *[self._exchange(flat_bucket, kept / brought) for flat_bucket in self._flat_part.flat_buckets], strict=True
        )
        self._distance = math.hypot(*gaps) / norm if (norm := math.hypot(*norms)) else math.hypot(*gaps)
        self._weight = kept + brought
        self._unpack(self._weight)
        nbytes = sum(flat_bucket.flat.nbytes for flat_bucket in self._flat_part.flat_buckets)
        spans = [(begun, time.perf_counter())]
        recorder.finish_step(self._round, spans, nbytes, len(self._flat_part.flat_buckets), None, nbytes)
        self._round += 1
        self._num_exchanges += 1
        lane.session.next_step()

    def _exchange(self, flat_bucket: FlatBucket, ratio: float) -> tuple[float, float]:
        """Give a flat bucket to the receiver, and add the sender's; how far that is from ours, and how large ours is.

        `ratio` is how many times the sender's weight ours is: as different as the weights are, so are the flat_buckets.
        """
        lane = self._context.lane
        receiver, sender = self._neighbours()
        ours = flat_bucket.flat.cpu()  # the same memory, if it is there already
        theirs = torch.empty_like(ours)

        def run() -> None:
            coming = self._channel.recv(theirs.view(torch.uint8), sender, _PAYLOAD_TAG)
            going = self._channel.send(ours.view(torch.uint8), receiver, _PAYLOAD_TAG)
            coming.wait()
            going.wait()

        lane.wait(lane.send(run, f"bucket {flat_bucket.index}", ours.nbytes, flat_bucket.index))
        gap, norm = _norm(ours - ratio * theirs), _norm(ours)
        flat_bucket.flat.add_(theirs.to(flat_bucket.flat.device))
        return gap, norm

    @torch.no_grad()
    def _average(self) -> None:
        self._handshake(Call.AVERAGE)
        self._pack(self._weight)
        pending_mean = launch_mean(
            self._context, self._flat_set, self._flat_part, weight=self._weight, with_buffers=True, clock=self._clock
        )
        headers = finish_mean(self._context, self._flat_set, pending_mean, with_buffers=True)
        self._unpack(headers.total_weight)
        self._weight = 1.0
        self._diverged = False

    def _handshake(self, call: Call, weight: float = 0.0, nonfinite: int = -1) -> dict[int, Head]:
        head = Head(self._round, 0, weight, self._clock, nonfinite, 1, Flag.NONE, bytes(8), call)
        return handshake(self._context.lane, self._channel, self._neighbours().peers, head, self._flat_set.names)

    def _neighbours(self) -> Neighbours:
        groups = self._context.lane.groups
        return neighbours(self._pace.topology, groups.rank, groups.size, self._round)

    def _pack(self, weight: float) -> None:
        for view, param in zip(self._flat_part.views, self._params, strict=True):
            torch.mul(param, weight, out=view)

    def _unpack(self, weight: float) -> None:
        for view, param in zip(self._flat_part.views, self._params, strict=True):
            param.copy_(view.div_(weight))

    # What is known and kept

    def describe(self, bucket: int) -> str:
        return self._flat_set.describe(bucket) or super().describe(bucket)

    def stats(self) -> Stats:
        """`replica_distance` is ‖z − z'‖ / ‖z‖ in the last exchange, before it: z our parameters, z' our sender's."""
        return {
            "num_exchanges": self._num_exchanges,
            "push_weight": self._weight,
            "replica_distance": self._distance,
        }

    def state(self) -> SavedPace:
        """Return what this rank alone stores, for it belongs to this rank's own parameters."""
        due, apart = int(bool(self._due)), int(self._diverged)
        own = numbers_in_state("gossip", clock=self._clock, round=self._round, due=due, apart=apart)
        return SavedPace({}, own | {"gossip.weight": torch.tensor(self._weight, dtype=torch.float64, device="cpu")})

    def load(self, saved: SavedPace) -> None:
        self._flat_set.register()
        self.reset()
        if (
            "gossip.weight" not in saved.own
        ):  # of other ranks than these: what parameters were loaded here, nobody knows
            self._round, self._diverged = 0, not self._alone
            return
        self._clock, self._round = int(saved.own["gossip.clock"]), int(saved.own["gossip.round"])
        self._weight = float(saved.own["gossip.weight"])
        self._diverged = bool(saved.own["gossip.apart"])
        if int(saved.own["gossip.due"]):
            self._due.set()

    def reset(self) -> None:
        self._weight = 1.0
        self._diverged = False
        self._due.clear()


def _norm(flat: torch.Tensor) -> float:
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return float(torch.linalg.vector_norm(real, dtype=torch.promote_types(real.dtype, torch.float32)))
