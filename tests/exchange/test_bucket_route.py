"""A route computes, copies and launches in the order of its rounds, and says what it sends."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import gradsync as gs
from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT, Choice, Codec, Compressor
from gradsync.compress.rounds import (
    BucketForm,
    CodedBucket,
    Compute,
    Gather,
    NoRound,
    Rounds,
    Sum,
    SumInside,
    Trade,
    across,
    exact,
)
from gradsync.errors import GradSyncError, NotEnoughMemory
from gradsync.exchange.bucket_route import BucketRoute, PreparedRound, RoutedBucket, codec_rounds, prepared_rounds
from gradsync.exchange.flat import FlatBucket, Form, Item, lay_out
from gradsync.exchange.pinned import StagedPayload
from gradsync.transport.pending import Promise

NUMEL = 64 * 48
GATHER = ["encode", "down", "gather", "up", "decode"]
SUM = ["encode", "down", "sum", "up", "decode"]
ORDERS: dict[str, tuple[Compressor, int, list[str]]] = {
    "one sum": (gs.bf16(), 2, SUM),
    "drawn elements": (gs.randomk(0.1), 2, SUM),
    "gathered": (gs.int8(), 2, GATHER),
    "two phases": (
        gs.int8(),
        3,
        ["encode", "down", "trade", "up", "encode", "down", "gather", "up", "decode"],
    ),
    "two sums": (gs.powersgd(2), 2, ["encode", "down", "sum", "up", "encode", "down", "sum", "up", "decode"]),
}


class Apart(StagedPayload):
    """As that of a GPU on gloo, where copies are made before and after a round; here they are noted."""

    notes: list[str]

    def __init__(self, nbytes: float, tensor: torch.Tensor, notes: list[str]) -> None:
        super().__init__(nbytes, tensor, tensor)
        self.staged, self.notes = True, notes

    def copy_to_host(self, part: int | slice = slice(None)) -> None:
        self.notes.append("down")

    def copy_to_device(self) -> None:
        self.notes.append("up")


class Members:
    """Ranks whose rounds are over at once."""

    in_memory = False

    def __init__(self, size: int, notes: list[str]) -> None:
        self.size, self.rank, self._notes = size, 0, notes

    def for_sums(self, form: Form) -> torch.Tensor:
        return form.zeros()

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    def sum_share(self, form: Form) -> float:
        return 0.5

    def sum_way(self, form: Form) -> str:
        return "noted"

    def _note(self, what: str) -> Promise:
        self._notes.append(what)
        return Promise(what, 0, 0)

    def sum(self, flat: torch.Tensor, bucket: int) -> Promise:
        return self._note("sum")

    def gather(self, rows: torch.Tensor, bucket: int) -> Promise:
        return self._note("gather")

    def trade(self, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> Promise:
        return self._note("trade")


class NotedBucket(RoutedBucket):
    """Its payloads are apart."""

    notes: list[str]

    def numbers(self, numel: int, dtype: torch.dtype) -> Apart:
        payload: Any = super().numbers(numel, dtype)
        return Apart(payload.nbytes, payload.sent, self.notes)

    def rows(self, num_rows: int, nbytes: Any, claimed: float) -> Apart:
        payload: Any = super().rows(num_rows, nbytes, claimed)
        return Apart(payload.nbytes, payload.sent, self.notes)


def bucket_of(compressor: Compressor | None) -> FlatBucket:
    items, form = lay_out([Item.like("weight", torch.empty(64, 48))], align_nbytes=1)
    choice = EXACT if compressor is None else compressor.choose(items[0].param)
    flat_bucket = FlatBucket(0, torch.randn(form.numel), items, choice)
    flat_bucket.begin_keeping()
    return flat_bucket


@pytest.mark.parametrize("case", ORDERS)
def test_copies_stand_between_what_is_computed_and_its_rounds(case: str) -> None:
    compressor, size, expected = ORDERS[case]
    flat_bucket, notes = bucket_of(compressor), list[str]()
    members = Members(size, notes)
    bucket = NotedBucket(flat_bucket, members, torch.device("cpu"))
    bucket.notes = notes
    assert flat_bucket.choice.codec is not None
    for what, computing, stage in prepared_rounds(flat_bucket.choice.codec.rounds(bucket), rank=0):
        for run in computing:
            before = len(notes)
            run(0)
            if len(notes) == before:
                notes.append(what.removesuffix("_s"))
        if stage is not None:
            notes.append(type(stage).__name__.lower())
    assert notes == expected


@pytest.mark.parametrize("case", ORDERS)
def test_a_route_launches_its_rounds_and_says_what_it_sends(case: str) -> None:
    compressor, size, expected = ORDERS[case]
    flat_bucket, notes = bucket_of(compressor), list[str]()
    members = Members(size, notes)
    assert flat_bucket.choice.codec is not None
    rounds = flat_bucket.choice.codec.rounds(RoutedBucket(flat_bucket, members, torch.device("cpu")))
    route = BucketRoute(flat_bucket, rounds, members)
    for step in range(2):
        assert all(pending is not None for pending in route.go(step))
    assert notes == 2 * [what for what in expected if what in ("sum", "gather", "trade")]
    ways = {"gathered": "gather", "two phases": "two_phase"}
    assert route.way == ways.get(case, "noted")
    assert route.sent_nbytes > 0
    assert [span.what for span in flat_bucket.spans[: len(flat_bucket.spans) // 2]] == [
        f"{what}_s" for what in expected if what in ("encode", "decode")
    ]


def test_what_is_not_compressed_is_one_sum_of_the_bucket_itself() -> None:
    flat_bucket, notes = bucket_of(None), list[str]()
    members = Members(2, notes)
    route = BucketRoute(flat_bucket, exact(RoutedBucket(flat_bucket, members, torch.device("cpu"))), members)
    before = flat_bucket.flat.clone()
    assert len(list(route.go(0))) == 1
    assert (notes, route.way, route.sent_nbytes) == (["sum"], "noted", NUMEL * 4 * 0.5)
    assert torch.equal(flat_bucket.flat, before)
    assert not flat_bucket.spans


@pytest.mark.parametrize("case", ORDERS)
def test_a_step_runs_all_that_is_computed_before_each_round_in_its_order(case: str) -> None:
    compressor, size, expected = ORDERS[case]
    flat_bucket, notes = bucket_of(compressor), list[str]()
    members = Members(size, notes)
    bucket = NotedBucket(flat_bucket, members, torch.device("cpu"))
    bucket.notes = notes
    assert flat_bucket.choice.codec is not None
    route = BucketRoute(flat_bucket, flat_bucket.choice.codec.rounds(bucket), members)
    assert not notes, "nothing runs before a step"
    for _ in route.go(0):
        pass
    assert notes == [what for what in expected if what not in ("encode", "decode")]


class Launched(Members):
    """Rounds are kept with what they were given."""

    def __init__(self, size: int, in_memory: bool = False) -> None:
        super().__init__(size, [])
        self.in_memory, self.given = in_memory, list[tuple[Any, ...]]()  # type: ignore[misc]

    def sum(self, flat: torch.Tensor, bucket: int) -> Promise:
        self.given.append((flat.data_ptr(), bucket))
        return super().sum(flat, bucket)

    def gather(self, rows: torch.Tensor, bucket: int) -> Promise:
        self.given.append((rows.data_ptr(), bucket))
        return super().gather(rows, bucket)

    def trade(self, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> Promise:
        self.given.append((rows.data_ptr(), mine.data_ptr(), tuple(mine.shape), bucket))
        return super().trade(rows, mine, bucket)


def every_round(payloads: dict[str, Any]) -> Rounds:
    yield Compute(lambda step: None)
    yield Sum(payloads["numbers"])
    yield Gather(payloads["rows"])
    yield Trade(payloads["rows"], payloads["mine"])
    yield SumInside(payloads["numbers"])
    yield NoRound()


def payloads_of(bucket: RoutedBucket) -> dict[str, Any]:
    return {
        "numbers": bucket.numbers(10, torch.float64),
        "rows": bucket.rows(3, lambda: 16, 12.0),
        "mine": bucket.rows(3, lambda: 16, 12.0),
    }


def test_every_round_is_launched_with_its_payloads_and_the_number_of_the_bucket() -> None:
    flat_bucket, members, inside = bucket_of(None), Launched(3), Launched(1)
    flat_bucket.index = 7
    given = payloads_of(RoutedBucket(flat_bucket, members, torch.device("cpu")))
    numbers, rows, mine = (given[name].sent.data_ptr() for name in ("numbers", "rows", "mine"))
    route = BucketRoute(flat_bucket, every_round(given), members, within_hosts=inside)  # type: ignore[arg-type]
    pending = list(route.go(0))
    assert members.given == [(numbers, 7), (rows, 7), (rows, mine, (48,), 7)]
    assert inside.given == [(numbers, 7)]
    assert [each is None for each in pending] == [False] * 4 + [True]


def one_sum(given: dict[str, Any]) -> Rounds:
    yield Sum(given["numbers"])


def one_gather(given: dict[str, Any]) -> Rounds:
    yield Gather(given["rows"])


def one_trade(given: dict[str, Any]) -> Rounds:
    yield Trade(given["rows"], given["mine"])


def one_absence(given: dict[str, Any]) -> Rounds:
    yield NoRound()


@pytest.mark.parametrize(
    ("rounds", "in_memory", "way", "nbytes"),
    [
        (one_sum, False, "noted", 10 * 8 * 0.5),  # by the share that the algorithm sends
        (one_gather, False, "gather", 2 * 16.0),  # this rank's row to each of the others
        (one_gather, True, "gather", 0.0),
        (one_trade, False, "two_phase", 2 * 16.0),  # a part to each of the others
        (one_absence, False, "", 0.0),
        (every_round, False, "noted", 10 * 8 * 0.5 + 2 * 16 + 2 * 16),
    ],
)
def test_what_a_round_sends_is_counted_by_hand(rounds: Any, in_memory: bool, way: str, nbytes: float) -> None:
    flat_bucket, members = bucket_of(None), Launched(3, in_memory)
    given = payloads_of(RoutedBucket(flat_bucket, members, torch.device("cpu")))
    route = BucketRoute(flat_bucket, rounds(given), members, within_hosts=members)  # type: ignore[arg-type]
    assert (route.way, route.sent_nbytes) == (way, nbytes)


def test_a_payload_claims_what_its_codec_says_and_has_the_memory_it_needs() -> None:
    flat_bucket = bucket_of(None)
    given = payloads_of(RoutedBucket(flat_bucket, Members(3, []), torch.device("cpu")))
    assert (given["numbers"].nbytes, given["numbers"].tensor.dtype) == (80, torch.float64)
    assert (given["rows"].nbytes, tuple(given["rows"].tensor.shape)) == (12.0, (3, 16))
    for payload in given.values():
        assert payload.tensor is payload.sent, "where the channel reads it, it is made"
        assert not payload.staged


class Foreign(Codec):
    """A codec of another project's, whose rounds do what a test says."""

    name = "foreign"

    def __init__(self, rounds: Any) -> None:
        self._rounds = rounds

    def nbytes(self, param: Param) -> int:
        return param.nbytes

    def rounds(self, bucket: CodedBucket) -> Rounds:
        return self._rounds(bucket)


def raises(bucket: CodedBucket) -> Rounds:
    raise ZeroDivisionError("no numbers")


def raises_later(bucket: CodedBucket) -> Rounds:
    yield Sum(bucket.whole)
    raise ZeroDivisionError("no numbers")


def divide_by_nothing(step: int) -> None:
    raise ZeroDivisionError("no numbers")


def raises_in_a_step(bucket: CodedBucket) -> Rounds:
    yield Compute(divide_by_nothing, encode=1)
    yield Sum(bucket.whole)


def asks_for_too_much(bucket: CodedBucket) -> Rounds:
    raise NotEnoughMemory("there is no more memory")


def rounds_of(rounds: Any) -> list[PreparedRound]:
    items, form = lay_out([Item.like(f"p{number}", torch.empty(3)) for number in range(5)])
    flat_bucket = FlatBucket(4, form.zeros(), items, Choice(Foreign(rounds)))
    bucket = RoutedBucket(flat_bucket, Members(2, []), torch.device("cpu"))
    return prepared_rounds(codec_rounds(flat_bucket, bucket, lambda index: f"[bucket {index}]"), rank=0)


SAID = (
    "[bucket 4] the compressor Foreign raised ZeroDivisionError in bucket 4 (p0, p1, p2 and 2 more): no numbers; "
    "correct its code, or leave it out of the plan"
)


@pytest.mark.parametrize("rounds", [raises, raises_later])
def test_what_a_compressor_raises_is_told_as_its_own(rounds: Any) -> None:
    with pytest.raises(GradSyncError, match=f"^{re.escape(SAID)}$"):
        rounds_of(rounds)


def test_what_a_compressor_raises_in_a_step_is_told_as_its_own() -> None:
    first, *_ = rounds_of(raises_in_a_step)
    for _ in range(2):
        with pytest.raises(GradSyncError, match=f"^{re.escape(SAID)}$"):
            first.computing[0](0)


def test_what_we_refuse_a_compressor_is_not_told_as_its_own() -> None:
    with pytest.raises(NotEnoughMemory, match=r"^there is no more memory$"):
        rounds_of(asks_for_too_much)


@pytest.mark.parametrize("rounds", [None, 3])
def test_rounds_that_are_none_are_refused(rounds: object) -> None:
    with pytest.raises(TypeError, match=f"what a generator yields, got {rounds}"):
        rounds_of(lambda bucket: rounds)
    with pytest.raises(TypeError, match=rf"Compute, Sum, Gather, Trade, SumInside, NoRound .*, got {rounds}"):
        rounds_of(lambda bucket: iter([rounds]))


class Inside:
    def sum(self, flat: torch.Tensor, bucket: int) -> None:
        return None


def test_a_rank_that_does_not_speak_for_its_host_has_as_many_rounds_and_brings_nothing() -> None:
    flat_bucket, notes = bucket_of(gs.int8()), list[str]()
    members, codec = Members(3, notes), gs.int8().choose(bucket_of(None).items[0].param).codec
    bucket = RoutedBucket(flat_bucket, members, torch.device("cpu"))
    assert codec is not None
    lengths = []
    for speaks in (True, False):
        inner = bucket if speaks else BucketForm(bucket.params, 3)
        route = BucketRoute(
            flat_bucket,
            across(bucket, codec.rounds(inner), speaks),
            members,
            within_hosts=Inside(),  # type: ignore[arg-type]
        )
        lengths.append(len(list(route.go(0))))
        assert route.way == "across_hosts"
        assert (route.sent_nbytes > 0) == speaks
    assert lengths == [4, 4]
    assert notes == ["trade", "gather"]
    assert not flat_bucket.flat.any()
