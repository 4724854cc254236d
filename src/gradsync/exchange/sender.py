"""The way of buckets under a plan: each by the rounds that its compressor needs, all in one order.

    bucket ─▶ FlatBucket ─▶ its route: as it is, or the rounds of its codec, perhaps across hosts only ─▶ Pipeline
                                                                                        audited now and then

Without a compressor a bucket is summed at once, and none of this stands in its way. An audit shows what compression
does to these gradients: now and then the exact sum travels too, and the two are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT, Choice
from gradsync.compress.rounds import BucketForm, CodedBucket, across, exact
from gradsync.exchange.bucket_route import BucketRoute, RoutedBucket, codec_rounds
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import FlatBucket
from gradsync.exchange.participants import AllRanks, Leaders, Participants, WithinHosts
from gradsync.exchange.pinned import travel_device
from gradsync.exchange.pipeline import PendingRounds, Pipeline
from gradsync.exchange.residuals import KeptState, begin, collect, place
from gradsync.exchange.routes import SumRoute
from gradsync.plan.sync_plan import Plan
from gradsync.trace.tally import Tally
from gradsync.transport.groups import HOST, is_on_host
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Pending, Promise


def audited(
    rounds: PendingRounds, flat_bucket: FlatBucket, everybody: Participants, tally: Tally, step: int
) -> PendingRounds:
    """Do these rounds, and after them one more for the exact sum."""
    exact_sum = flat_bucket.flat.clone()
    yield from rounds
    yield everybody.sum(exact_sum, flat_bucket.index)
    tally.audit(step, flat_bucket.flat, exact_sum)


class GradientExchange(NamedTuple):
    """The parts by which gradients travel."""

    lane: Lane
    exact: ExactSum
    sender: Sender


class Sender:
    """Sends buckets on their routes."""

    def __init__(
        self,
        lane: Lane,
        parent: dist.ProcessGroup,
        exact: ExactSum,
        plan: Plan,
        device: torch.device,
        on_one_rank: bool = False,
        pipeline: Pipeline | None = None,
    ) -> None:
        """Every rank of the group makes it at once.

        `on_one_rank`: one rank alone compresses too (to measure it). `pipeline`: one that others use too, in turn.
        """
        self.tally = Tally()
        self.flat_buckets: list[FlatBucket] = []
        self._waiting = KeptState({}, {})  # what has no place now: of frozen parameters, or on one rank alone
        self._lane = lane
        self._exact = exact
        self._compress = plan.compress if lane.groups.size > 1 or on_one_rank else None
        self.goes_in_rounds = self._compress is not None
        self._audit_every = plan.audit_every
        self._routes: dict[int, BucketRoute] = {}
        self._exact_routes: dict[int, BucketRoute] = {}  # while nothing is done to it
        self._sums: dict[int, tuple[FlatBucket, SumRoute, torch.Tensor]] = {}  # by index, where nothing is compressed
        self._everybody = AllRanks(lane, exact)
        if self._compress is None:
            return
        on_host = lane.groups.data[device.type].on_host
        self._pipeline = open_pipeline(lane, device) if pipeline is None else pipeline
        self._on_host = on_host
        if len(lane.hosts) > 1:
            self._within_hosts = WithinHosts(lane, parent, device, on_host)
            self._leaders = Leaders(lane, parent, travel_device(device, on_host))

    def choose(self, param: Param) -> Choice:
        """Return how this parameter's gradient is to travel; the same on every rank."""
        choice = EXACT if self._compress is None else self._compress.choose(param)
        return EXACT if choice.across and len(self._lane.hosts) == 1 else choice

    def prepare(self, flat_buckets: list[FlatBucket], compress: bool) -> None:
        """Let these buckets travel from now on; every rank calls this at once. What was kept for others moves over.

        `compress` False: not yet.
        """
        self.remove(self.flat_buckets)
        self.add(flat_buckets, compress)

    def add(self, flat_buckets: list[FlatBucket], compress: bool = True) -> None:
        """Let these buckets travel too, beginning with what waits for them; every rank calls this at once."""
        self.flat_buckets = self.flat_buckets + flat_buckets
        self._exact_routes, self._sums = {}, {}
        # What holds nothing has nothing to compress.
        travelling = [p for p in flat_buckets if compress and p.choice.codec is not None and p.flat.numel()]
        for flat_bucket in travelling:
            if self._encodes(flat_bucket.choice):
                flat_bucket.begin_keeping()
        self._waiting = place(self._waiting, travelling)
        for flat_bucket in travelling:
            self._routes[flat_bucket.index] = self._route(flat_bucket)

    def remove(self, flat_buckets: list[FlatBucket]) -> None:
        """Let these buckets travel no more; what was kept for them waits."""
        now, gone = collect(flat_buckets), {flat_bucket.index for flat_bucket in flat_buckets}
        self._waiting = KeptState(self._waiting.residuals | now.residuals, self._waiting.factors | now.factors)
        self.flat_buckets = [flat_bucket for flat_bucket in self.flat_buckets if flat_bucket.index not in gone]
        self._routes = {index: route for index, route in self._routes.items() if index not in gone}
        self._exact_routes, self._sums = {}, {}

    def kept(self) -> KeptState:
        """Copies of all that is kept between steps; before compression begins, what it will begin with."""
        compressed = [flat_bucket for flat_bucket in self.flat_buckets if self._encodes(flat_bucket.choice)]
        now = collect(compressed) if self._routes else begin(compressed)
        return KeptState(now.residuals | self._waiting.residuals, now.factors | self._waiting.factors)

    def expect(self, flat_buckets: list[FlatBucket]) -> None:
        """Such buckets will be added: what compression begins with waits for them."""
        self._waiting = begin(flat_bucket for flat_bucket in flat_buckets if self._encodes(flat_bucket.choice))

    def replace(self, kept: KeptState) -> None:
        """Forget these buckets and what is kept for them: the next ones begin with this instead."""
        self.flat_buckets, self._waiting = [], kept
        self._routes, self._exact_routes, self._sums = {}, {}, {}

    def rescale(self, factor: float) -> None:
        """Multiply all residuals: gradients will come in another unit."""
        if factor != 1.0:
            for flat_bucket in self.flat_buckets:
                if flat_bucket.residual is not None:
                    flat_bucket.residual.mul_(factor)
            # Not in place: `kept` gave these away.
            scaled = {name: residual * factor for name, residual in self._waiting.residuals.items()}
            self._waiting = self._waiting._replace(residuals=scaled)

    @property
    def waiting(self) -> list[str]:
        """The parameters with a residual that are not compressed now, so that nothing sends it."""
        return sorted(self._waiting.residuals)

    def launch(self, flat_bucket: FlatBucket) -> Pending:
        """Start a bucket's rounds."""
        if self._compress is None:
            known = self._sums.get(flat_bucket.index)
            if known is None or known[0] is not flat_bucket:
                known = self._sums[flat_bucket.index] = (flat_bucket, *self._exact.route_of(flat_bucket.flat))
            _, route, flat = known
            return route.launch(flat, flat_bucket.index)
        step = self._lane.step
        bucket_route = self._route_in(flat_bucket, step)
        rounds = bucket_route.go(step)
        if bucket_route is not self._routes.get(flat_bucket.index):
            return self._send(flat_bucket, rounds, flat_bucket.nbytes, step)
        flat_bucket.begin_step()
        self.tally.codec(flat_bucket.choice.label).sent(
            step, bucket_route.way, flat_bucket.raw_nbytes, flat_bucket.payload_nbytes, bucket_route.sent_nbytes
        )
        if self._audit_every is not None and step % self._audit_every == 0:
            rounds = audited(rounds, flat_bucket, self._everybody, self.tally, step)
        return self._send(flat_bucket, rounds, flat_bucket.payload_nbytes, step)

    def flush(self) -> None:
        """Bring each bucket of this step to its end: all are under way."""
        if self.goes_in_rounds:
            self._pipeline.flush()

    def traffic(self, flat_buckets: list[FlatBucket] | None = None) -> tuple[int, str]:
        """The bytes that this rank sends over a network for these buckets, or all; and by which algorithms or ways."""
        step, asked = self._lane.step, self.flat_buckets if flat_buckets is None else flat_buckets
        routes = [self._route_in(flat_bucket, step) for flat_bucket in asked]
        return round(sum(route.sent_nbytes for route in routes)), "+".join(sorted({route.way for route in routes}))

    def sent_nbytes(self, flat_bucket: FlatBucket, step: int) -> float:
        """The bytes of this bucket that this rank puts on a network in that step; asked in every one."""
        return self._route_in(flat_bucket, step).sent_nbytes

    def _route_in(self, flat_bucket: FlatBucket, step: int) -> BucketRoute:
        """The bucket's route: by its codec's rounds, or exact while it is not compressed yet."""
        index = flat_bucket.index
        route = self._routes.get(index)
        if route is not None and step >= flat_bucket.choice.exact_steps:
            return route
        plain = self._exact_routes.get(index)
        if plain is None:
            bucket = RoutedBucket(flat_bucket, self._everybody, flat_bucket.flat.device)
            plain = self._exact_routes[index] = BucketRoute(flat_bucket, exact(bucket), self._everybody)
        return plain

    def _send(self, flat_bucket: FlatBucket, rounds: PendingRounds, nbytes: int, step: int) -> Pending:
        delivery = Promise(flat_bucket.what, nbytes, flat_bucket.index, self._on_host)
        self._lane.follow(delivery)
        self._pipeline.take(_dated(rounds, self._lane, step), delivery)
        return delivery

    # Which way

    def _encodes(self, choice: Choice) -> bool:
        """Return whether this rank encodes anything: across hosts only one of each host does."""
        return not choice.across or self._leaders.rank >= 0

    def _route(self, flat_bucket: FlatBucket) -> BucketRoute:
        tally, place = self.tally.codec(flat_bucket.choice.label), self._lane.place
        sent_from = travel_device(flat_bucket.flat.device, self._on_host)
        if not flat_bucket.choice.across:
            bucket = RoutedBucket(flat_bucket, self._everybody, sent_from)
            return BucketRoute(flat_bucket, codec_rounds(flat_bucket, bucket, place), self._everybody, tally)
        self._within_hosts.open()
        self._leaders.open()
        bucket = RoutedBucket(flat_bucket, self._leaders, sent_from)
        encodes = self._encodes(flat_bucket.choice)
        inner: CodedBucket = bucket if encodes else BucketForm(bucket.params, self._leaders.size)
        rounds = across(bucket, codec_rounds(flat_bucket, inner, place), encodes)
        return BucketRoute(flat_bucket, rounds, self._leaders, tally, self._within_hosts)


def _dated(rounds: PendingRounds, lane: Lane, step: int) -> PendingRounds:
    """Do these rounds, each belonging to the step in which the first began."""
    while True:
        with lane.at_step(step):
            try:
                pending = next(rounds)
            except StopIteration:
                return
        yield pending


def open_pipeline(lane: Lane, device: torch.device) -> Pipeline:
    """A pipeline for this device; on gloo with a thread of its own."""
    return Pipeline(lane.hire() if lane.groups.data[device.type].on_host else None, device)


def main_device(devices: Iterable[torch.device]) -> torch.device:
    """The device where the gradients are: a GPU if any is there."""
    return next(iter(sorted(devices, key=lambda device: (device.type == "cpu", str(device)))), HOST)


def travelling_devices(parent: dist.ProcessGroup, devices: Iterable[torch.device], plan: Plan) -> set[torch.device]:
    """The devices of tensors that travel: payloads made on a GPU go through host memory on gloo."""
    staged = plan.compress is not None and any(is_on_host(parent, device.type) for device in devices)
    return {*devices, HOST} if staged else set(devices)
