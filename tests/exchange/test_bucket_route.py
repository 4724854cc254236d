"""A route computes, copies and launches in the order of its rounds, and says what it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradsync as gs
from gradsync.compress.recipe import EXACT, Compressor
from gradsync.compress.rounds import BucketForm, across, exact
from gradsync.exchange.bucket_route import BucketRoute, RoutedBucket, prepared_rounds
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
