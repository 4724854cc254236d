"""How buckets travel under a plan: each by the way that its compressor needs, all in one order.

    bucket ─▶ Parcel ─▶ its route: plain │ casting │ sampling │ coding │ low_rank, perhaps across hosts only ─▶ Desk
                                                                                               audited now and then

Without a compressor a bucket is summed at once, and none of this stands in its way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from gradsync.compress.blocks import BlockCodec, two_phases_pay
from gradsync.compress.cast import Cast
from gradsync.compress.choice import EXACT, Choice, Codec, Param
from gradsync.compress.powersgd import PowerSGD
from gradsync.compress.randomk import RandomK
from gradsync.exchange.circle import Circle, Everybody, Leaders
from gradsync.exchange.desk import Desk, Journey
from gradsync.exchange.exact import Exact
from gradsync.exchange.house import House
from gradsync.exchange.journeys.across import Across
from gradsync.exchange.journeys.audit import audited
from gradsync.exchange.journeys.casting import Casting
from gradsync.exchange.journeys.coding import Gathering, TwoPhases
from gradsync.exchange.journeys.low_rank import LowRank
from gradsync.exchange.journeys.plain import Plain
from gradsync.exchange.journeys.route import Route
from gradsync.exchange.journeys.sampling import Sampling
from gradsync.exchange.keeping import Kept, begin, collect, place
from gradsync.exchange.parcel import Parcel
from gradsync.exchange.staging import HOST, wire_device
from gradsync.plan import Plan
from gradsync.trace.tally import Account, Tally
from gradsync.transport.groups import is_on_host
from gradsync.transport.lane import Lane
from gradsync.transport.tickets import Promise, Ticket


class Shipping:
    """Sends buckets on their journeys."""

    def __init__(
        self,
        lane: Lane,
        parent: dist.ProcessGroup,
        exact: Exact,
        plan: Plan,
        device: torch.device,
        timeout: float,
        even_alone: bool = False,
        desk: Desk | None = None,
    ) -> None:
        """Every rank of the group makes it at once.

        `even_alone`: one rank alone compresses too (to measure it). `desk`: one that others use too, in turn.
        """
        self.tally = Tally()
        self.parcels: list[Parcel] = []
        self._waiting = Kept({}, {})  # what has no place now: of frozen parameters, or on one rank alone
        self._lane = lane
        self._exact = exact
        self._compress = plan.compress if lane.groups.size > 1 or even_alone else None
        self._audit_every = plan.audit_every
        self._routes: dict[int, Route] = {}
        self._sent_plainly: dict[int, float] = {}  # bytes on a network, by bucket, while nothing is done to it
        self._everybody = Everybody(lane, exact)
        if self._compress is None:
            return
        on_host = lane.groups.data[device.type].on_host
        self._desk = open_desk(lane, device) if desk is None else desk
        self._on_host = on_host
        if len(lane.hosts) > 1:
            self._house = House(lane, parent, device, on_host, timeout)
            self._leaders = Leaders(lane, parent, wire_device(device, on_host).type, timeout)

    def choose(self, param: Param) -> Choice:
        """How this parameter's gradient is to travel; the same on every rank."""
        choice = EXACT if self._compress is None else self._compress.choose(param)
        return EXACT if choice.across and len(self._lane.hosts) == 1 else choice

    def prepare(self, parcels: list[Parcel], compress: bool) -> None:
        """These buckets will travel from now on; every rank calls this at once. What was kept for others moves over.

        `compress` False: not yet.
        """
        self.remove(self.parcels)
        self.add(parcels, compress)

    def add(self, parcels: list[Parcel], compress: bool = True) -> None:
        """These buckets travel too from now on, and begin with what waits for them; every rank calls this at once."""
        self.parcels = self.parcels + parcels
        self._sent_plainly = {}
        # What holds nothing has nothing to compress.
        travelling = [p for p in parcels if compress and p.choice.codec is not None and p.flat.numel()]
        for parcel in travelling:
            if parcel.residual is None and parcel.choice.feedback and self._encodes(parcel.choice):
                parcel.residual = torch.zeros_like(parcel.flat, dtype=torch.float32)
        self._waiting = place(self._waiting, travelling)
        for parcel in travelling:
            self._routes[parcel.index] = self._route(parcel)

    def remove(self, parcels: list[Parcel]) -> None:
        """These buckets travel no more; what was kept for them waits."""
        now, gone = collect(parcels), {parcel.index for parcel in parcels}
        self._waiting = Kept(self._waiting.residuals | now.residuals, self._waiting.factors | now.factors)
        self.parcels = [parcel for parcel in self.parcels if parcel.index not in gone]
        self._routes = {index: route for index, route in self._routes.items() if index not in gone}

    def kept(self) -> Kept:
        """Copies of all that is kept between steps; before compression begins, what it will begin with."""
        compressed = [parcel for parcel in self.parcels if self._encodes(parcel.choice)]
        now = collect(compressed) if self._routes else begin(compressed)
        return Kept(now.residuals | self._waiting.residuals, now.factors | self._waiting.factors)

    def expect(self, parcels: list[Parcel]) -> None:
        """Such buckets will be added: what compression begins with waits for them."""
        self._waiting = begin(parcel for parcel in parcels if self._encodes(parcel.choice))

    def replace(self, kept: Kept) -> None:
        """Forget these buckets and what is kept for them: the next ones begin with this instead."""
        self.parcels, self._routes, self._waiting = [], {}, kept

    def rescale(self, factor: float) -> None:
        """Multiply all residuals: gradients will come in another unit."""
        if factor != 1.0:
            residuals = [parcel.residual for parcel in self.parcels if parcel.residual is not None]
            for residual in (*residuals, *self._waiting.residuals.values()):
                residual.mul_(factor)

    @property
    def waiting(self) -> list[str]:
        """The parameters with a residual that are not compressed now, so that nothing sends it."""
        return sorted(self._waiting.residuals)

    def launch(self, parcel: Parcel) -> Ticket:
        """Start a bucket's journey."""
        if self._compress is None:
            return self._exact.launch(parcel.flat, parcel.index)
        step, route = self._lane.step, self._routes.get(parcel.index)
        if route is None or step < parcel.choice.exact_steps:
            plain = Plain(parcel, self._everybody)
            return self._send(parcel, plain.go(step), parcel.nbytes, step)
        account = self.tally.account(parcel.choice.label)
        parcel.spans = []
        account.sent(step, route.way, parcel.raw_nbytes, parcel.payload_nbytes, route.sent_nbytes)
        journey = route.go(step)
        if self._audit_every is not None and step % self._audit_every == 0:
            journey = audited(journey, parcel, self._everybody, self.tally, step)
        return self._send(parcel, journey, parcel.payload_nbytes, step)

    def flush(self) -> None:
        """All buckets of this step are under way: see each to its end."""
        if self._compress is not None:
            self._desk.flush()

    def wire(self, parcels: list[Parcel] | None = None) -> tuple[int, str]:
        """The bytes that this rank sends over a network for these buckets, or all; and by which algorithms or ways."""
        routes = [self._route_now(parcel) for parcel in (self.parcels if parcels is None else parcels)]
        return round(sum(route.sent_nbytes for route in routes)), "+".join(sorted({route.way for route in routes}))

    def sent_nbytes(self, parcel: Parcel, step: int) -> float:
        """The bytes of this bucket that this rank puts on a network in that step; asked in every one."""
        route = self._routes.get(parcel.index)
        if route is not None and step >= parcel.choice.exact_steps:
            return route.sent_nbytes
        known = self._sent_plainly.get(parcel.index)
        if known is None:
            known = self._sent_plainly[parcel.index] = Plain(parcel, self._everybody).sent_nbytes
        return known

    def _route_now(self, parcel: Parcel) -> Route:
        route = self._routes.get(parcel.index)
        warm = route is not None and self._lane.step >= parcel.choice.exact_steps
        return route if route is not None and warm else Plain(parcel, self._everybody)

    def _send(self, parcel: Parcel, journey: Journey, nbytes: int, step: int) -> Ticket:
        delivery = Promise(parcel.what, nbytes, parcel.index, self._on_host)
        self._lane.follow(delivery)
        self._desk.take(_dated(journey, self._lane, step), delivery)
        return delivery

    # Which way

    def _encodes(self, choice: Choice) -> bool:
        """Whether this rank encodes anything: across hosts only one of each host does."""
        return not choice.across or self._leaders.rank >= 0

    def _route(self, parcel: Parcel) -> Route:
        codec, account = parcel.choice.codec, self.tally.account(parcel.choice.label)
        assert codec is not None
        wire = wire_device(parcel.flat.device, self._on_host)
        if not parcel.choice.across:
            return route_of(codec, parcel, self._everybody, wire, account)
        rounds = _num_rounds(codec, self._leaders)
        inner = route_of(codec, parcel, self._leaders, wire, account) if self._encodes(parcel.choice) else None
        return Across(parcel, self._house, inner, rounds)


def _dated(journey: Journey, lane: Lane, step: int) -> Journey:
    """The same journey; its rounds belong to the step in which it began."""
    while True:
        with lane.dated(step):
            try:
                ticket = next(journey)
            except StopIteration:
                return
        yield ticket


def route_of(codec: Codec, parcel: Parcel, circle: Circle, wire: torch.device, account: Account) -> Route:
    match codec:
        case Cast():
            return Casting(parcel, codec, circle, wire, account)
        case RandomK():
            return Sampling(parcel, codec, circle, wire, account)
        case PowerSGD():
            return LowRank(parcel, codec, circle, wire, account)
        case BlockCodec():
            way = TwoPhases if two_phases_pay(circle.size, circle.in_memory) else Gathering
            return way(parcel, codec, circle, wire, account)
    raise AssertionError(f"no way is known for {codec!r}")


def _num_rounds(codec: Codec, circle: Circle) -> int:
    """How often its journey yields, on every rank: who does not speak for its host keeps count."""
    in_parts = isinstance(codec, BlockCodec) and two_phases_pay(circle.size, circle.in_memory)
    return 2 if in_parts or isinstance(codec, PowerSGD) else 1


def open_desk(lane: Lane, device: torch.device) -> Desk:
    """On gloo with a thread of its own."""
    return Desk(lane.hire() if lane.groups.data[device.type].on_host else None, device)


def main_device(devices: Iterable[torch.device]) -> torch.device:
    """Where the gradients are: a GPU if any is there."""
    return next(iter(sorted(devices, key=lambda device: (device.type == "cpu", str(device)))), HOST)


def travelling_devices(parent: dist.ProcessGroup, devices: Iterable[torch.device], plan: Plan) -> set[torch.device]:
    """Where tensors are that travel: payloads made on a GPU go through host memory on gloo."""
    staged = plan.compress is not None and any(is_on_host(parent, device.type) for device in devices)
    return {*devices, HOST} if staged else set(devices)
