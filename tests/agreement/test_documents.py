"""Ranks as threads bring documents: all go on, or all raise what the same difference is called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradsync as gs
from gradsync.agreement.attach_check import check_forms, check_order, explain, first_difference
from gradsync.agreement.documents import agree, majority, share
from gradsync.agreement.header import Head, Headers, pack_header


class Table:
    """Where ranks lay their rows and read those of all; as gloo does, it takes no rows of different lengths."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed = [0] * size
        self.exchanges = 0
        self._rows: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)

    def lane(self, rank: int) -> Any:
        def exchange(row: bytes, what: str = "") -> list[bytes]:
            self._rows[rank] = row
            self._barrier.wait(10)
            rows = list(self._rows)
            assert len({len(each) for each in rows}) == 1, "gloo would abort the process"
            if self._barrier.wait(10) == 0:
                self.exchanges += 1
            return rows

        def same(mine: bytes, what: str = "") -> bool:
            return len(set(exchange(mine))) == 1

        def fail() -> None:
            self.failed[rank] += 1

        groups = SimpleNamespace(size=self.size, ranks=tuple(10 * rank for rank in range(self.size)))
        return SimpleNamespace(exchange=exchange, same=same, fail=fail, groups=groups)


def meet(table: Table, call: Callable[[Any, int], Any]) -> list[Any]:
    """What each rank's call returns, or the text of the disagreement that it raises."""

    def one(rank: int) -> Any:
        try:
            return call(table.lane(rank), rank)
        except gs.Disagreement as error:
            return str(error)

    with ThreadPoolExecutor(table.size) as pool:
        return list(pool.map(one, range(table.size)))


def told(documents: list[Any], ranks: list[int]) -> str:
    return f"{documents} on {ranks}"


def test_equal_documents_are_never_sent() -> None:
    table = Table(3)
    orders = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 2}]
    assert meet(table, lambda lane, rank: agree(lane, orders[rank], told)) == [None] * 3
    assert table.exchanges == 1
    assert table.failed == [0] * 3


def test_documents_of_any_length_raise_the_same_everywhere_and_end_the_lane() -> None:
    table = Table(3)
    documents = [{"a": 1}, {"a": "x" * 100}, {"a": 1}]
    said = f"{documents} on [0, 10, 20]"
    assert meet(table, lambda lane, rank: agree(lane, documents[rank], told)) == [said] * 3
    assert table.failed == [1] * 3


def test_documents_of_one_length_are_told_apart() -> None:
    assert meet(Table(2), lambda lane, rank: agree(lane, {"a": rank}, told)) == ["[{'a': 0}, {'a': 1}] on [0, 10]"] * 2


def test_shared_documents_come_in_the_order_of_ranks() -> None:
    documents = [{"launched": ["b" * rank] * rank} for rank in range(3)]
    assert meet(Table(3), lambda lane, rank: share(lane, documents[rank])) == [documents] * 3


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (["a", "b", "b"], ("b", "ranks 1 and 2", "a", "rank 0")),
        (["a", "b"], ("a", "rank 0", "b", "rank 1")),
        (["b", "a", "a", "b"], ("b", "ranks 0 and 3", "a", "ranks 1 and 2")),
        ([1, None, 1], ("1", "ranks 0 and 2", "null", "rank 1")),
        (["a", "b", "c", "a"], ("a", "ranks 0 and 3", "b", "rank 1")),
    ],
)
def test_the_majority_is_right_and_of_two_equal_ones_the_first(values: list[Any], found: tuple[str, ...]) -> None:
    assert majority(values, list(range(len(values)))) == found


def buckets(*lists: list[str]) -> str:
    return first_difference(list(lists), list(range(len(lists))), 9).split(": ", 1)[1].partition("; ")[0]


def test_the_first_bucket_that_differs_is_named() -> None:
    assert buckets(["x", "b"], ["x", "c"], ["x", "b"]) == "number 1 was b on ranks 0 and 2 but c on rank 1"
    assert buckets(["x"], ["x", "c"]) == "number 1 was nothing on rank 0 but c on rank 1"
    assert buckets(["x"], ["x"]) == "the first that differs cannot be told"


def launches(*orders: int) -> Headers:
    """What ranks say in synchronization 6 of the buckets that they launched."""
    heads = [Head(6, 0, 1.0, 1, -1, 1, 0, bytes(8), order=order) for order in orders]
    return Headers(torch.stack([pack_header(head, bytearray(1)) for head in heads]))


def test_ranks_that_launched_in_other_orders_share_what_they_launched() -> None:
    table = Table(2)
    orders = launches(1, 2)
    [one, two] = meet(table, lambda lane, rank: check_order(lane, orders, ["bucket"] * (rank + 1)))
    assert one == two
    assert "in synchronization 6: number 1 was nothing on rank 0 but bucket on rank 10;" in one
    assert table.failed == [1, 1]


def test_ranks_that_launched_in_one_order_send_nothing() -> None:
    table = Table(2)
    same = launches(5, 5)
    assert meet(table, lambda lane, rank: check_order(lane, same, ["a"])) == [None, None]
    assert table.exchanges == 0


def test_other_layouts_raise_and_name_the_odd_ranks() -> None:
    table = Table(3)
    said = meet(table, lambda lane, rank: check_forms(lane, [(rank == 1, 4)]))
    assert len(set(said)) == 1
    assert said[0].startswith("the ranks packed their gradients differently: rank 10 not as ranks 0 and 20 (layout ")
    assert table.failed == [1] * 3


def test_equal_layouts_go_on_and_one_rank_alone_asks_nobody() -> None:
    table = Table(2)
    assert meet(table, lambda lane, rank: check_forms(lane, [("a", 4)])) == [None, None]
    assert (table.exchanges, table.failed) == (1, [0, 0])
    alone = Table(1)
    assert meet(alone, lambda lane, rank: check_forms(lane, [("a", 4)])) == [None]
    assert alone.exchanges == 0


def attached(**changes: Any) -> dict[str, Any]:
    row = {"name": "w", "dtype": "float32"}
    return {"protocol": 3, "refusal": None, "plan": {"pace": "every_step"}, "parameters": [row], **changes}


def test_a_protocol_is_said_before_a_refusal_and_that_before_plans_and_parameters() -> None:
    other = attached(protocol=4, refusal="no", plan={"pace": "gossip"}, parameters=[])
    assert explain([attached(), other], [0, 1]).startswith("the gradsync protocol is 3 on rank 0 but 4 on rank 1;")
    assert explain([attached(), other | {"protocol": 3}], [0, 1]) == "rank 1 refused to attach: no"
    said = explain([attached(), other | {"protocol": 3, "refusal": None}], [0, 1])
    assert said == (
        "the plans differ: pace is every_step on rank 0 but gossip on rank 1; pass the same plan on every rank"
    )


def test_a_model_with_more_parameters_is_told_which_is_the_first() -> None:
    rows = [{"name": "w", "dtype": "float32"}, {"name": "b", "dtype": "float32"}]
    said = explain([attached(), attached(parameters=rows), attached()], [0, 1, 2])
    assert said == (
        'the model has 1 parameters on ranks 0 and 2 but 2 on rank 1 (the first that is not everywhere is "b"); '
        "build the same model on every rank"
    )


def test_parameters_are_compared_before_buffers_and_apart_from_them() -> None:
    buffer = {"kind": "buffer", "name": "mean", "dtype": "float32"}
    late = [buffer, {"name": "w", "dtype": "float32"}]
    assert explain([attached(parameters=late), attached()], [0, 1]).startswith(
        'the model has 1 buffers on rank 0 but 0 on rank 1 (the first that is not everywhere is "mean")'
    )
    other = [{**buffer, "dtype": "float64"}, {"name": "v", "dtype": "float32"}]
    assert explain([attached(parameters=late), attached(parameters=other)], [0, 1]) == (
        'parameter 0 is "w" on rank 0 but "v" on rank 1; build the same model on every rank, in the same order'
    )


def test_another_optimizer_has_advice_of_its_own() -> None:
    rows = [[{"name": "w", "optimizer": f"SGD of group {group}"}] for group in (0, 1)]
    assert explain([attached(parameters=each) for each in rows], [0, 1]) == (
        'parameter 0 ("w") has optimizer SGD of group 0 on rank 0 but SGD of group 1 on rank 1; make the same '
        "optimizers with the same groups on every rank"
    )
