"""Gossip: every rank steps by itself, then averages with a neighbour only, by push-sum.

    rank 0    step ┐    step ┐    step ┐           each gives half of what it holds to its receiver of the round,
                   ├──┐      ├──┐      ├──┐        keeps the other half, and adds what its sender gives to it
    rank 1    step ┘  ▼ step ┘  ▼ step ┘  ▼

A rank holds a weight ω, 1 at first, and x; its parameters are z = x / ω. They are all that is stored: x = ω·z, also
after a step of the optimizer, which sees z only. In an exchange

    give   x / 2, ω / 2      x ← x / 2 + what comes      ω ← ω / 2 + what comes      z ← x / ω

so Σ x and Σ ω over the ranks stay what they were, whoever sends to whom: that is what keeps the mean. Here each gets
from one and gives to one (see `neighbours`), so ω stays 1; it travels all the same, for it is what makes z right.

A rank waits for its neighbours of a round, which hear from theirs, and for nobody else: one that is slow now and then
is felt by those first, and by the others rounds later. Buffers and optimizers stay each rank's own. `drain()` makes the
exact mean Σ x / Σ ω on every rank, and all buffers rank 0's: a run ends with it, or else with as many models as ranks.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from gradsync import paces
from gradsync.exchange.fleet import Cargo, Fleet
from gradsync.exchange.parcel import Parcel
from gradsync.guard.calls import Call
from gradsync.guard.header import Flag, Head
from gradsync.pace.after_step import AfterStep
from gradsync.pace.contract import Saved, Site, Stats
from gradsync.pace.greeting import GREETING_TAG, greet
from gradsync.pace.neighbours import Neighbours, neighbours
from gradsync.pace.passage import arrive, depart, first_nonfinite
from gradsync.transport.page import Phase

_CHANNEL = "gossip"
_PARCEL_TAG = GREETING_TAG + 1


class Gossip(AfterStep):
    """`gossip(topology)` at work."""

    def __init__(self, pace: paces.Gossip, site: Site, parent: dist.ProcessGroup, timeout: float) -> None:
        """Every rank makes it at once, with equal parameters."""
        groups = site.lane.groups
        self._pace = pace
        super().__init__(site)
        self._params = self._trained.params
        self._alone = groups.size == 1
        # Gloo, on whatever the parameters' own group is: messages go through host memory.
        groups.add_part(parent, _CHANNEL, list(range(groups.size)), "cpu", timeout)
        self._channel = groups.data[_CHANNEL]
        cargo = [Cargo(name, param.detach()) for name, param in self._trained.named]
        self._fleet = Fleet(cargo, site.exact, site.shipping, site.indices, site.bucket_bytes)
        self._ship = self._fleet.ships[0]
        self._round = 0
        self._weight = 1.0  # ω
        self._apart = False  # whether replicas may differ
        self._num_exchanges = 0
        self._distance: float | None = None

    @property
    def replicas_equal(self) -> bool:
        return not self._apart

    def after_backward(self, count: int, aborted: Flag) -> bool:
        self._apart = not self._alone
        return super().after_backward(count, aborted)

    def _is_time(self) -> bool:
        return not self._alone and self._clock % self._pace.every == 0

    def before_meeting(self, call: Call) -> None:
        """See [Neighbours first] in `greeting`."""
        if self._due:
            self._act()
        if not self._alone:
            self._greet(call)

    def drain(self) -> bool:
        if self._due:
            self._act()
        if self._apart:
            self._average()
        return False

    # What travels

    @torch.no_grad()
    def _act(self) -> None:
        lane, recorder = self._site.lane, self._site.recorder
        self._due.clear()
        lane.at(Phase.SYNCHRONIZING)
        recorder.start_waiting(on_device=False)
        begun = time.perf_counter()
        kept = self._weight / 2
        self._fill(kept)
        checks = self._site.guard.nonfinite != "allow"
        heads = self._greet(Call.NEIGHBOURS, kept, first_nonfinite(self._ship) if checks else -1)
        brought = heads[self._neighbours().sender].weight
        gaps, norms = zip(*[self._swap(parcel, kept / brought) for parcel in self._ship.parcels], strict=True)
        self._distance = math.hypot(*gaps) / norm if (norm := math.hypot(*norms)) else math.hypot(*gaps)
        self._weight = kept + brought
        self._empty(self._weight)
        nbytes = sum(parcel.flat.nbytes for parcel in self._ship.parcels)
        spans = [(begun, time.perf_counter())]
        recorder.finish_step(self._round, spans, nbytes, len(self._ship.parcels), None, nbytes)
        self._round += 1
        self._num_exchanges += 1
        lane.step += 1
        lane.at(Phase.COMPUTING)

    def _swap(self, parcel: Parcel, ratio: float) -> tuple[float, float]:
        """Give a parcel to the receiver, and add the sender's; how far that is from ours, and how large ours is.

        `ratio` is how many times the sender's weight ours is: as different as the weights are, so are the parcels.
        """
        lane = self._site.lane
        receiver, sender = self._neighbours()
        ours = parcel.flat.cpu()  # the same memory, if it is there already
        theirs = torch.empty_like(ours)

        def run() -> None:
            coming = self._channel.recv(theirs.view(torch.uint8), sender, _PARCEL_TAG)
            going = self._channel.send(ours.view(torch.uint8), receiver, _PARCEL_TAG)
            coming.wait()
            going.wait()

        lane.wait(lane.send(run, f"bucket {parcel.index}", ours.nbytes, parcel.index))
        gap, norm = _norm(ours - ratio * theirs), _norm(ours)
        parcel.flat.add_(theirs.to(parcel.flat.device))
        return gap, norm

    @torch.no_grad()
    def _average(self) -> None:
        self._greet(Call.AVERAGE)
        self._fill(self._weight)
        passage = depart(self._site, self._fleet, self._ship, weight=self._weight, with_buffers=True, clock=self._clock)
        headers = arrive(self._site, self._fleet, passage, with_buffers=True)
        self._empty(headers.total_weight())
        self._weight = 1.0
        self._apart = False

    def _greet(self, call: Call, weight: float = 0.0, nonfinite: int = -1) -> dict[int, Head]:
        head = Head(self._round, 0, weight, self._clock, nonfinite, 1, Flag.NONE, bytes(8), call)
        return greet(self._site.lane, self._channel, self._neighbours().peers, head, self._fleet.names)

    def _neighbours(self) -> Neighbours:
        groups = self._site.lane.groups
        return neighbours(self._pace.topology, groups.rank, groups.size, self._round)

    def _fill(self, weight: float) -> None:
        for view, param in zip(self._ship.views, self._params, strict=True):
            torch.mul(param, weight, out=view)

    def _empty(self, weight: float) -> None:
        for view, param in zip(self._ship.views, self._params, strict=True):
            param.copy_(view.div_(weight))

    # What is known and kept

    def describe(self, bucket: int) -> str:
        return self._fleet.describe(bucket) or super().describe(bucket)

    def stats(self) -> Stats:
        """`replica_distance` is ‖z − z'‖ / ‖z‖ in the last exchange, before it: z our parameters, z' our sender's."""
        return {
            "num_exchanges": self._num_exchanges,
            "push_weight": self._weight,
            "replica_distance": self._distance,
        }

    def state(self) -> Saved:
        """This rank's own, for it belongs to this rank's own parameters."""
        numbers = {"clock": self._clock, "round": self._round, "due": int(bool(self._due)), "apart": int(self._apart)}
        own = {f"gossip.{key}": torch.tensor(number, device="cpu") for key, number in numbers.items()}
        return Saved({}, own | {"gossip.weight": torch.tensor(self._weight, dtype=torch.float64, device="cpu")})

    def load(self, saved: Saved) -> None:
        self._fleet.enlist()
        self.reset()
        if (
            "gossip.weight" not in saved.own
        ):  # of other ranks than these: what parameters were loaded here, nobody knows
            self._round, self._apart = 0, not self._alone
            return
        self._clock, self._round = int(saved.own["gossip.clock"]), int(saved.own["gossip.round"])
        self._weight = float(saved.own["gossip.weight"])
        self._apart = bool(saved.own["gossip.apart"])
        if int(saved.own["gossip.due"]):
            self._due.set()

    def reset(self) -> None:
        self._weight = 1.0
        self._apart = False
        self._due.clear()


def _norm(flat: torch.Tensor) -> float:
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return float(torch.linalg.vector_norm(real, dtype=torch.promote_types(real.dtype, torch.float32)))
