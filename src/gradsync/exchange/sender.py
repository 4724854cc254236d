"""How buckets travel under a plan: each by the way that its compressor needs, all in one order.

    bucket ─▶ FlatBucket ─▶ its route: plain │ casting │ sampling │ coding │ low_rank, perhaps across hosts only ─▶
    Pipeline
                                                                                               audited now and then

Without a compressor a bucket is summed at once, and none of this stands in its way.

What compression does to these gradients: now and then the exact sum travels too, and the two are compared.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from gradsync.compress.blocks import BlockCodec, two_phases_pay
from gradsync.compress.cast import Cast
from gradsync.compress.powersgd import PowerSGD
from gradsync.compress.randomk import RandomK
from gradsync.compress.recipe import EXACT, Choice, Codec, Param
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import FlatBucket
from gradsync.exchange.journeys.across import Across
from gradsync.exchange.journeys.casting import Casting
from gradsync.exchange.journeys.coding import Gathering, TwoPhases
from gradsync.exchange.journeys.low_rank import LowRank
from gradsync.exchange.journeys.plain import Plain
from gradsync.exchange.journeys.route import Route
from gradsync.exchange.journeys.sampling import Sampling
from gradsync.exchange.participants import AllRanks, Leaders, Participants, WithinHosts
from gradsync.exchange.pinned import HOST, wire_device
from gradsync.exchange.pipeline import Journey, Pipeline
from gradsync.exchange.residuals import Kept, begin, collect, place
from gradsync.plan.sync_plan import Plan
from gradsync.trace.tally import CodecTally, Tally
from gradsync.transport.groups import is_on_host
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Pending, Promise


def audited(journey: Journey, flat_bucket: FlatBucket, everybody: Participants, tally: Tally, step: int) -> Journey:
    """The same journey, and after it one more round for the exact sum."""
    exact = flat_bucket.flat.clone()
    yield from journey
    yield everybody.sum(exact, flat_bucket.index)
    tally.audit(step, flat_bucket.flat, exact)


class Sender:
    """Sends buckets on their journeys."""

    def __init__(
        self,
        lane: Lane,
        parent: dist.ProcessGroup,
        exact: ExactSum,
        plan: Plan,
        device: torch.device,
        timeout: float,
        even_alone: bool = False,
        pipeline: Pipeline | None = None,
    ) -> None:
        """Every rank of the group makes it at once.

        `even_alone`: one rank alone compresses too (to measure it). `pipeline`: one that others use too, in turn.
        """
        self.tally = Tally()
        self.flat_buckets: list[FlatBucket] = []
        self._waiting = Kept({}, {})  # what has no place now: of frozen parameters, or on one rank alone
        self._lane = lane
        self._exact = exact
        self._compress = plan.compress if lane.groups.size > 1 or even_alone else None
        self._audit_every = plan.audit_every
        self._routes: dict[int, Route] = {}
        self._sent_plainly: dict[int, float] = {}  # bytes on a network, by bucket, while nothing is done to it
        self._everybody = AllRanks(lane, exact)
        if self._compress is None:
            return
        on_host = lane.groups.data[device.type].on_host
        self._pipeline = open_pipeline(lane, device) if pipeline is None else pipeline
        self._on_host = on_host
        if len(lane.hosts) > 1:
            self._within_hosts = WithinHosts(lane, parent, device, on_host, timeout)
            self._leaders = Leaders(lane, parent, wire_device(device, on_host).type, timeout)

    def choose(self, param: Param) -> Choice:
        """How this parameter's gradient is to travel; the same on every rank."""
        choice = EXACT if self._compress is None else self._compress.choose(param)
        return EXACT if choice.across and len(self._lane.hosts) == 1 else choice

    def prepare(self, flat_buckets: list[FlatBucket], compress: bool) -> None:
        """These buckets will travel from now on; every rank calls this at once. What was kept for others moves over.

        `compress` False: not yet.
        """
        self.remove(self.flat_buckets)
        self.add(flat_buckets, compress)

    def add(self, flat_buckets: list[FlatBucket], compress: bool = True) -> None:
        """These buckets travel too from now on, and begin with what waits for them; every rank calls this at once."""
        self.flat_buckets = self.flat_buckets + flat_buckets
        self._sent_plainly = {}
        # What holds nothing has nothing to compress.
        travelling = [p for p in flat_buckets if compress and p.choice.codec is not None and p.flat.numel()]
        for flat_bucket in travelling:
            if flat_bucket.residual is None and flat_bucket.choice.feedback and self._encodes(flat_bucket.choice):
                flat_bucket.residual = torch.zeros_like(flat_bucket.flat, dtype=torch.float32)
        self._waiting = place(self._waiting, travelling)
        for flat_bucket in travelling:
            self._routes[flat_bucket.index] = self._route(flat_bucket)

    def remove(self, flat_buckets: list[FlatBucket]) -> None:
        """These buckets travel no more; what was kept for them waits."""
        now, gone = collect(flat_buckets), {flat_bucket.index for flat_bucket in flat_buckets}
        self._waiting = Kept(self._waiting.residuals | now.residuals, self._waiting.factors | now.factors)
        self.flat_buckets = [flat_bucket for flat_bucket in self.flat_buckets if flat_bucket.index not in gone]
        self._routes = {index: route for index, route in self._routes.items() if index not in gone}

    def kept(self) -> Kept:
        """Copies of all that is kept between steps; before compression begins, what it will begin with."""
        compressed = [flat_bucket for flat_bucket in self.flat_buckets if self._encodes(flat_bucket.choice)]
        now = collect(compressed) if self._routes else begin(compressed)
        return Kept(now.residuals | self._waiting.residuals, now.factors | self._waiting.factors)

    def expect(self, flat_buckets: list[FlatBucket]) -> None:
        """Such buckets will be added: what compression begins with waits for them."""
        self._waiting = begin(flat_bucket for flat_bucket in flat_buckets if self._encodes(flat_bucket.choice))

    def replace(self, kept: Kept) -> None:
        """Forget these buckets and what is kept for them: the next ones begin with this instead."""
        self.flat_buckets, self._routes, self._waiting = [], {}, kept

    def rescale(self, factor: float) -> None:
        """Multiply all residuals: gradients will come in another unit."""
        if factor != 1.0:
            residuals = [flat_bucket.residual for flat_bucket in self.flat_buckets if flat_bucket.residual is not None]
            for residual in (*residuals, *self._waiting.residuals.values()):
                residual.mul_(factor)

    @property
    def waiting(self) -> list[str]:
        """The parameters with a residual that are not compressed now, so that nothing sends it."""
        return sorted(self._waiting.residuals)

    def launch(self, flat_bucket: FlatBucket) -> Pending:
        """Start a bucket's journey."""
        if self._compress is None:
            return self._exact.launch(flat_bucket.flat, flat_bucket.index)
        step, route = self._lane.step, self._routes.get(flat_bucket.index)
        if route is None or step < flat_bucket.choice.exact_steps:
            plain = Plain(flat_bucket, self._everybody)
            return self._send(flat_bucket, plain.go(step), flat_bucket.nbytes, step)
        account = self.tally.codec(flat_bucket.choice.label)
        flat_bucket.spans = []
        account.sent(step, route.way, flat_bucket.raw_nbytes, flat_bucket.payload_nbytes, route.sent_nbytes)
        journey = route.go(step)
        if self._audit_every is not None and step % self._audit_every == 0:
            journey = audited(journey, flat_bucket, self._everybody, self.tally, step)
        return self._send(flat_bucket, journey, flat_bucket.payload_nbytes, step)

    def flush(self) -> None:
        """All buckets of this step are under way: see each to its end."""
        if self._compress is not None:
            self._pipeline.flush()

    def wire(self, flat_buckets: list[FlatBucket] | None = None) -> tuple[int, str]:
        """The bytes that this rank sends over a network for these buckets, or all; and by which algorithms or ways."""
        routes = [
            self._route_now(flat_bucket)
            for flat_bucket in (self.flat_buckets if flat_buckets is None else flat_buckets)
        ]
        return round(sum(route.sent_nbytes for route in routes)), "+".join(sorted({route.way for route in routes}))

    def sent_nbytes(self, flat_bucket: FlatBucket, step: int) -> float:
        """The bytes of this bucket that this rank puts on a network in that step; asked in every one."""
        route = self._routes.get(flat_bucket.index)
        if route is not None and step >= flat_bucket.choice.exact_steps:
            return route.sent_nbytes
        known = self._sent_plainly.get(flat_bucket.index)
        if known is None:
            known = self._sent_plainly[flat_bucket.index] = Plain(flat_bucket, self._everybody).sent_nbytes
        return known

    def _route_now(self, flat_bucket: FlatBucket) -> Route:
        route = self._routes.get(flat_bucket.index)
        warm = route is not None and self._lane.step >= flat_bucket.choice.exact_steps
        return route if route is not None and warm else Plain(flat_bucket, self._everybody)

    def _send(self, flat_bucket: FlatBucket, journey: Journey, nbytes: int, step: int) -> Pending:
        delivery = Promise(flat_bucket.what, nbytes, flat_bucket.index, self._on_host)
        self._lane.follow(delivery)
        self._pipeline.take(_dated(journey, self._lane, step), delivery)
        return delivery

    # Which way

    def _encodes(self, choice: Choice) -> bool:
        """Whether this rank encodes anything: across hosts only one of each host does."""
        return not choice.across or self._leaders.rank >= 0

    def _route(self, flat_bucket: FlatBucket) -> Route:
        codec, account = flat_bucket.choice.codec, self.tally.codec(flat_bucket.choice.label)
        assert codec is not None
        wire = wire_device(flat_bucket.flat.device, self._on_host)
        if not flat_bucket.choice.across:
            return route_of(codec, flat_bucket, self._everybody, wire, account)
        self._within_hosts.open()
        self._leaders.open()
        rounds = _num_rounds(codec, self._leaders)
        inner = (
            route_of(codec, flat_bucket, self._leaders, wire, account) if self._encodes(flat_bucket.choice) else None
        )
        return Across(flat_bucket, self._within_hosts, inner, rounds)


def _dated(journey: Journey, lane: Lane, step: int) -> Journey:
    """The same journey; its rounds belong to the step in which it began."""
    while True:
        with lane.dated(step):
            try:
                pending = next(journey)
            except StopIteration:
                return
        yield pending


def route_of(
    codec: Codec, flat_bucket: FlatBucket, participants: Participants, wire: torch.device, account: CodecTally
) -> Route:
    match codec:
        case Cast():
            return Casting(flat_bucket, codec, participants, wire, account)
        case RandomK():
            return Sampling(flat_bucket, codec, participants, wire, account)
        case PowerSGD():
            return LowRank(flat_bucket, codec, participants, wire, account)
        case BlockCodec():
            way = TwoPhases if two_phases_pay(participants.size, participants.in_memory) else Gathering
            return way(flat_bucket, codec, participants, wire, account)
    raise AssertionError(f"no way is known for {codec!r}")


def _num_rounds(codec: Codec, participants: Participants) -> int:
    """How often its journey yields, on every rank: who does not speak for its host keeps count."""
    in_parts = isinstance(codec, BlockCodec) and two_phases_pay(participants.size, participants.in_memory)
    return 2 if in_parts or isinstance(codec, PowerSGD) else 1


def open_pipeline(lane: Lane, device: torch.device) -> Pipeline:
    """On gloo with a thread of its own."""
    return Pipeline(lane.hire() if lane.groups.data[device.type].on_host else None, device)


def main_device(devices: Iterable[torch.device]) -> torch.device:
    """Where the gradients are: a GPU if any is there."""
    return next(iter(sorted(devices, key=lambda device: (device.type == "cpu", str(device)))), HOST)


def travelling_devices(parent: dist.ProcessGroup, devices: Iterable[torch.device], plan: Plan) -> set[torch.device]:
    """Where tensors are that travel: payloads made on a GPU go through host memory on gloo."""
    staged = plan.compress is not None and any(is_on_host(parent, device.type) for device in devices)
    return {*devices, HOST} if staged else set(devices)
