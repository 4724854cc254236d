"""A bucket's route: the rounds that its compressor yields (see `compress.rounds`), with memory and real ranks.

    yielded      Compute       Trade    Compute            Gather   Compute        read once, when the route is made
    in a step    encode, down  launch   up, add up, down   launch   up, decode     oldest bucket first: see `pipeline`

Before a round its payload goes to where it travels (`down`), after it back to where the bucket is (`up`): copies for
a GPU on gloo, nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from gradsync.compress.rounds import CodedBucket, Compute, Gather, NoRound, Payload, Rounds, Sum, SumInside, Trade
from gradsync.errors import GradSyncError
from gradsync.exchange.flat import FlatBucket, Form
from gradsync.exchange.participants import Members, Participants, WithinHosts
from gradsync.exchange.pinned import StagedPayload
from gradsync.exchange.pipeline import PendingRounds
from gradsync.trace.tally import CodecTally
from gradsync.transport.pending import Pending
from gradsync.transport.waiting import first_line

T = TypeVar("T")
_STAGES = (Compute, Sum, Gather, Trade, SumInside, NoRound)


class RoutedBucket(CodedBucket):
    """A flat bucket, and the ranks with which it goes through its rounds."""

    def __init__(self, flat_bucket: FlatBucket, members: Members, sent_from: torch.device) -> None:
        """`sent_from`: where payloads travel. Every rank of the group makes it at once."""
        self._members, self._sent_from = members, sent_from
        self.size, self.rank, self.in_memory = members.size, members.rank, members.in_memory
        self.params = [item.param for item in flat_bucket.items]
        self.spans = [item.span for item in flat_bucket.items]
        self.flat, self.device = flat_bucket.flat, flat_bucket.flat.device
        self.residual, self.factors = flat_bucket.residual, flat_bucket.factors
        self.numel, self.dtype = flat_bucket.flat.numel(), flat_bucket.flat.dtype
        self.whole = StagedPayload(flat_bucket.nbytes, flat_bucket.flat, flat_bucket.flat)

    def numbers(self, numel: int, dtype: torch.dtype) -> Payload:
        memory = self._members.for_sums(Form(numel, dtype, self._sent_from))
        return StagedPayload.beside(memory.nbytes, memory, self.device)

    def rows(self, num_rows: int, nbytes: Callable[[], int], claimed: float) -> Payload:
        memory = self._members.for_gathering((num_rows, nbytes()), self._sent_from)
        return StagedPayload.beside(claimed, memory, self.device)

    def prepare(self, make: Callable[[], T]) -> T:
        return make()


def codec_rounds(flat_bucket: FlatBucket, bucket: CodedBucket, place: Callable[[int], str]) -> Rounds:
    """Yield what a bucket's codec yields for it; what its code raises, now or in a step, is told as its own."""
    codec = flat_bucket.choice.codec
    assert codec is not None

    @contextmanager
    def telling() -> Iterator[None]:
        try:
            yield
        except GradSyncError:
            raise  # of what it has asked us for
        except Exception as error:
            raise GradSyncError(
                f"{place(flat_bucket.index)} the compressor {type(codec).__name__} raised {type(error).__name__} in "
                f"{flat_bucket.describe()}: {first_line(error)}; correct its code, or leave it out of the plan"
            ) from error

    with telling():
        rounds = codec.rounds(bucket)
    if not isinstance(rounds, Iterable):
        raise TypeError(f"the rounds of a compressor are what a generator yields, got {rounds!r}")
    with telling():
        for stage in rounds:
            yield stage._replace(run=telling()(stage.run)) if isinstance(stage, Compute) else stage


class PreparedRound(NamedTuple):
    """A round, and what is computed before it."""

    what: str  # as its seconds are counted
    computing: list[Callable[[int], object]]  # told the step
    round: Sum | Gather | Trade | SumInside | NoRound | None  # None: what is computed after the last one


def prepared_rounds(rounds: Rounds, rank: int) -> list[PreparedRound]:
    """Return what a codec yields, round by round, with the copies that are needed."""
    prepared, what, computing = [], "", list[Callable[[int], object]]()
    for stage in rounds:
        if not isinstance(stage, _STAGES):
            kinds = ", ".join(kind.__name__ for kind in _STAGES)
            raise TypeError(f"the rounds of a compressor are made of {kinds} (gradsync.compress.rounds), got {stage!r}")
        if isinstance(stage, Compute):
            what = what or stage.what
            computing.append(stage.run)
            continue
        before, after = _copies(stage, rank)
        prepared.append(PreparedRound(what, computing + before, stage))
        what, computing = "", after
    return [*prepared, PreparedRound(what, computing, None)]


def _copies(stage: object, rank: int) -> tuple[list[Callable[[int], object]], list[Callable[[int], object]]]:
    """The copies before a round, and those after it."""
    match stage:
        case Sum(StagedPayload() as payload) if payload.staged:
            return [lambda step: payload.copy_to_host()], [lambda step: payload.copy_to_device()]
        case Gather(StagedPayload() as rows) if rows.staged:
            return [lambda step: rows.copy_to_host(rank)], [lambda step: rows.copy_to_device()]
        case Trade(StagedPayload() as theirs, StagedPayload() as mine) if mine.staged:
            return [lambda step: mine.copy_to_host()], [lambda step: theirs.copy_to_device()]
    return [], []


class BucketRoute:
    """The way in which one bucket travels: made once, run in every step."""

    def __init__(
        self,
        flat_bucket: FlatBucket,
        rounds: Rounds,
        participants: Participants,
        tally: CodecTally | None = None,
        within_hosts: WithinHosts | None = None,
    ) -> None:
        """`within_hosts` where rounds ask for it. Every rank of the group makes it at once."""
        self._flat_bucket = flat_bucket
        self._tally = CodecTally() if tally is None else tally
        prepared = prepared_rounds(rounds, participants.rank)
        sent = [_sent(each.round, participants) for each in prepared]
        self.way = sent[0][0]  # for people: "gather", "two_phase", or the algorithm that adds payloads up
        self.sent_nbytes = sum((nbytes for _, nbytes in sent), 0.0)  # by this rank over a network, in a step
        launches = [_launch(each.round, flat_bucket.index, participants, within_hosts) for each in prepared]
        self._rounds = [
            (what, _as_one(runs), launch) for (what, runs, _), launch in zip(prepared, launches, strict=True)
        ]

    def go(self, step: int) -> PendingRounds:
        """Begin the rounds of one step, one after the other; at the end the bucket holds the sum over the ranks."""
        flat_bucket, tally = self._flat_bucket, self._tally
        for what, run, launch in self._rounds:
            if what:
                with tally.timing(what, flat_bucket.flat.device, flat_bucket.spans):
                    run(step)
            else:
                run(step)
            if launch is not None:
                yield launch()


def _as_one(runs: list[Callable[[int], object]]) -> Callable[[int], object]:
    def run_all(step: int) -> None:
        for run in runs:
            run(step)

    return runs[0] if len(runs) == 1 else run_all


def _sent(stage: object, who: Participants) -> tuple[str, float]:
    """The way by which a round goes, and how many bytes of it over a network."""
    match stage:
        case Sum(StagedPayload() as payload):
            form = Form(payload.sent.numel(), payload.sent.dtype, payload.sent.device)
            return who.sum_way(form), form.nbytes * who.sum_share(form)
        case Gather(StagedPayload() as rows):
            return "gather", 0.0 if who.in_memory else float((who.size - 1) * rows.sent[0].nbytes)
        case Trade(StagedPayload() as rows):
            return "two_phase", float((who.size - 1) * rows.sent[0].nbytes)
        case SumInside():
            return "across_hosts", 0.0
    return "", 0.0


def _launch(
    stage: object, index: int, who: Participants, within_hosts: WithinHosts | None
) -> Callable[[], Pending | None] | None:
    match stage:
        case Sum(StagedPayload() as payload):
            return partial(who.sum, payload.sent, index)
        case Gather(StagedPayload() as rows):
            return partial(who.gather, rows.sent, index)
        case Trade(StagedPayload() as rows, StagedPayload() as mine):
            return partial(who.trade, rows.sent, mine.sent.view(-1), index)
        case SumInside(StagedPayload() as payload) if within_hosts is not None:
            return partial(within_hosts.sum, payload.sent, index)
        case NoRound():
            return _nothing
    assert stage is None, f"no round is known for {stage!r}"
    return None


def _nothing() -> None:
    """Launch nothing: others do."""
