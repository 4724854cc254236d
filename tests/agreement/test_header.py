"""The step header: it says everything that it was told, and ranks out of step all hear the same sentence."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.agreement.calls import check_same_call
from gradsync.agreement.header import ORDER, Flag, Head, Headers, Mark, header_nbytes, merged, pack_header
from gradsync.agreement.outcome import nonfinite
from gradsync.agreement.same_step import check_headers

T, U = int(Mark.TRAINABLE), int(Mark.TRAINABLE | Mark.USED)

int32, int64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
heads = st.builds(
    Head,
    step=int64,
    layout_hash=st.integers(0, 2**64 - 1),
    weight=st.floats(allow_nan=False),
    backwards=int32,
    nonfinite=int32,
    micro_batches=int32,
    flags=st.integers(0, 2**32 - 1),
    digest=st.binary(min_size=8, max_size=8),
    call=int32,
    num_nonfinite=int64,
    order=st.integers(0, 2**64 - 1),
    replica_digest=st.binary(min_size=8, max_size=8),
    loss_scale=st.floats(allow_nan=False),
    num_steps=int32,
)


def head(**changes: Any) -> Head:
    usual = Head(
        step=4, layout_hash=77, weight=1.0, backwards=1, nonfinite=-1, micro_batches=1, flags=0, digest=bytes(8)
    )
    return usual._replace(**changes)


def headers(*rows: tuple[Head, list[int]]) -> Headers:
    return Headers(torch.stack([pack_header(row, bytearray(marks)) for row, marks in rows]))


@given(st.integers(0, 20).flatmap(lambda n: st.lists(st.tuples(heads, st.binary(min_size=n, max_size=n)), min_size=1)))
def test_a_header_says_what_it_was_told(rows: list[tuple[Head, bytes]]) -> None:
    received = headers(*[(each, list(marks)) for each, marks in rows])
    assert received.heads == [each for each, _ in rows]
    for index in range(len(rows[0][1])):
        assert [each & 15 for each in received.marks_of(index)] == [marks[index] & 15 for _, marks in rows]


def test_a_header_has_one_byte_per_parameter_and_a_fixed_head() -> None:
    assert pack_header(head(), bytearray(0)).numel() == header_nbytes(0)
    assert pack_header(head(step=2**40), bytearray(9)).numel() == header_nbytes(0) + 9
    assert pack_header(head(), bytearray(9)).dtype == torch.uint8


@given(
    st.integers(0, 8).flatmap(lambda n: st.lists(st.lists(st.integers(0, 15), min_size=n, max_size=n), min_size=1)),
    st.sampled_from([Mark.USED, Mark.TRAINABLE, Mark.REPEATED, Mark.SPARSE]),
)
def test_any_tells_for_each_parameter_whether_a_rank_set_the_mark(marks: list[list[int]], mark: Mark) -> None:
    expected = bytes(int(any(row[i] & mark for row in marks)) for i in range(len(marks[0])))
    assert headers(*[(head(), row) for row in marks]).any(mark) == expected


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.sampled_from([Flag.ABORTED, Flag.WEIGHTED, Flag.SHADOW]))
def test_flagged_tells_which_ranks_set_the_flag(flags: list[int], flag: int) -> None:
    received = headers(*[(head(flags=each), []) for each in flags])
    assert received.flagged(flag) == [rank for rank, each in enumerate(flags) if each & flag]


def test_the_total_weight_counts_micro_batches() -> None:
    rows = [head(weight=3.0, micro_batches=2), head(weight=0.5, micro_batches=4), head(weight=0.0)]
    assert headers(*[(row, []) for row in rows]).total_weight == 8.0


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2)), min_size=1, max_size=4))
def test_flags_of_any_rank_and_whether_all_launched_in_one_order(said: list[tuple[int, int]]) -> None:
    received = headers(*[(head(flags=flags, order=order), []) for flags, order in said])
    assert received.flags == functools.reduce(operator.or_, (flags for flags, _ in said))
    assert received.differ_in(ORDER) == (len({order for _, order in said}) > 1)


def test_a_parameter_is_used_if_any_rank_used_it() -> None:
    assert headers((head(), [U, T, T]), (head(), [T, T, U])).used == bytes([1, 0, 1])


# Merged on their way through a tree

small = st.builds(
    head,
    step=st.integers(4, 5),
    weight=st.sampled_from([0.0, 1.0, 2.5]),
    backwards=st.integers(1, 2),
    micro_batches=st.integers(1, 2),
    nonfinite=st.sampled_from([-1, -1, 0]),
    flags=st.sampled_from([0, 0, Flag.WEIGHTED, Flag.SHADOW, Flag.ABORTED]),
    call=st.sampled_from([0, 0, 0, 4]),
    order=st.sampled_from([0, 0, 0, 1]),
    replica_digest=st.sampled_from([bytes(8), b"aaaaaaaa", b"aaaaaaaa", b"bbbbbbbb"]),
    loss_scale=st.sampled_from([0.0, 8.0, 8.0, 16.0]),
    num_steps=st.sampled_from([-1, 1, 1, 2]),
)
said = st.lists(
    st.tuples(small, st.lists(st.sampled_from([0, T, U, U | Mark.SPARSE]), min_size=2, max_size=2)), min_size=1
)


@given(said, st.data())
def test_rows_merge_in_any_groups_into_the_same_row(rows: list[tuple[Head, list[int]]], data: st.DataObject) -> None:
    packed = [pack_header(each, bytes(marks)) for each, marks in rows]
    while len(packed) > 1:
        count = data.draw(st.integers(2, len(packed)))
        packed = [merged(torch.stack(packed[:count])), *packed[count:]]
    one, all_ = Headers(packed[0][None]), headers(*rows)
    assert (one.size, one.flags, one.notes, one.marks) == (all_.size, all_.flags, all_.notes, all_.marks)
    assert one.total_weight == pytest.approx(all_.total_weight)
    assert [one.needs_names(bits) for bits in (0, ORDER)] == [all_.needs_names(bits) for bits in (0, ORDER)]
    assert one.whole == (len(rows) == 1)


@given(said)
def test_whoever_must_be_named_is_asked_for(rows: list[tuple[Head, list[int]]]) -> None:
    """What merged headers leave untold is never more than who weighs how much and uses which parameters."""
    received, ranks = headers(*rows), tuple(range(len(rows)))
    if received.needs_names(0):
        return
    heads = received.heads
    assert len({(each.call, each.order) for each in heads}) == 1
    assert not any(each.flags & Flag.ABORTED or each.nonfinite >= 0 for each in heads)
    assert len({each.replica_digest for each in heads}) == 1 or bytes(8) in {each.replica_digest for each in heads}
    assert len({each.loss_scale for each in heads}) == 1 or 0.0 in {each.loss_scale for each in heads}
    taking_part = [each for each in heads if not each.flags & Flag.SHADOW]
    assert len({(each.step, each.layout_hash) for each in taking_part}) <= 1
    assert len({each.num_steps for each in taking_part} - {-1}) <= 1
    assert len({bool(mark & Mark.TRAINABLE) for _, marks in rows for mark in marks[:1]}) == 1
    check_same_call(received, ranks)
    check_headers(received, ["w", "b"], ranks)
    assert nonfinite(received, ["w", "b"], ranks) is None


@given(said)
def test_a_quick_look_never_hides_a_sentence(rows: list[tuple[Head, list[int]]]) -> None:
    """`check_headers` looks closely where merged headers say that it must: the close look finds no more without."""
    received, ranks = headers(*rows), tuple(range(len(rows)))

    def close_look() -> str | None:
        slow = headers(*rows)
        slow._differ_taking_part = -1  # whatever they say
        try:
            check_headers(slow, ["w", "b"], ranks)
        except gs.Disagreement as error:
            return str(error)
        return None

    try:
        check_headers(received, ["w", "b"], ranks)
        found = None
    except gs.Disagreement as error:
        found = str(error)
    assert found == close_look()


# What ranks say when they are not in the same synchronization


def complaint(*rows: tuple[Head, list[int]], ranks: tuple[int, ...] = (10, 11, 12)) -> str:
    with pytest.raises(gs.Disagreement) as caught:
        check_headers(headers(*rows), ["w", "b"], ranks[: len(rows)])
    return str(caught.value)


FIELDS = {"step": 5, "layout_hash": 78, "backwards": 2, "num_steps": 1, "call": 1}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_steps", [-1, 0, 1, 2])
def test_ranks_that_take_part_differ_by_all_they_say_and_by_nothing_they_keep_to_themselves(
    num_steps: int, weighted: bool
) -> None:
    flags = int(Flag.WEIGHTED) if weighted else 0
    one = head(num_steps=num_steps, flags=flags)
    assert headers((one, [T]), (one, [T])).same_place
    for field, value in FIELDS.items():
        two = one._replace(**{field: value})
        silent = weighted if field == "backwards" else field == "num_steps" and (num_steps < 0 or two == one)
        for pair in ((one, two), (two, one)):
            same = headers(*[(each, [T]) for each in pair]).same_place
            assert same == (silent or field == "call"), f"{field} {value} beside {getattr(one, field)}"


@pytest.mark.parametrize("flag", [Flag.SHADOW, Flag.ABORTED])
def test_who_takes_no_part_is_in_no_other_place(flag: Flag) -> None:
    out = head(step=9, layout_hash=1, backwards=7, num_steps=3, flags=int(flag))
    assert headers((head(), [T]), (out, [T])).same_place
    assert headers((out, [T]), (head(num_steps=4), [T])).same_place


def test_ranks_in_step_may_go_on() -> None:
    check_headers(headers((head(), [U, T]), (head(), [T, U])), ["w", "b"], (0, 1))


def test_ranks_in_different_steps_are_named_with_both_steps() -> None:
    said = complaint((head(), [U, U]), (head(), [U, U]), (head(step=5), [U, U]))
    assert said.startswith("rank 12 is in synchronization 5 and rank 10 in 4: they did not call backward equally often")
    assert "sync.join()" in said


def test_buckets_laid_out_differently_are_not_blamed_on_backward_calls() -> None:
    said = complaint((head(), [U, U]), (head(layout_hash=78), [U, U]))
    assert said.startswith("rank 11 and rank 10 packed their gradients differently in synchronization 4")
    assert "backward" not in said


def test_uneven_backwards_are_named_with_both_counts() -> None:
    said = complaint((head(), [U, U]), (head(backwards=3), [U, U]))
    assert said.startswith("rank 11 ran 3 backward calls since the last synchronization but rank 10 ran 1")
    assert "no_sync()" in said
    assert "set_batch_weight()" in said


@pytest.mark.parametrize(
    "other",
    [
        head(backwards=3, flags=Flag.WEIGHTED),
        head(backwards=3, micro_batches=3),
        head(backwards=0, flags=Flag.SHADOW),
        head(step=9, flags=Flag.ABORTED),
    ],
    ids=["weighted", "a longer window", "out of data", "aborted"],
)
def test_uneven_backwards_are_fine_with_a_reason(other: Head) -> None:
    check_headers(headers((head(), [U, U]), (other, [U, U])), ["w", "b"], (0, 1))


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((2, 1, 2), "ran 2 times since the last synchronization on ranks 10 and 12, but only once on rank 11: call"),
        ((0, 1, 0), "ran once since the last synchronization on rank 11, but not on ranks 10 and 12: call"),
        ((3, -1, 2), "ran 3 times since the last synchronization on rank 10, but only 2 times on rank 12: call"),
        ((3, 1, 2), "ran 3 times since the last synchronization on rank 10, but only once on ranks 11 and 12: call"),
    ],
    ids=["twice", "left out", "not said by all", "three ways"],
)
def test_uneven_steps_of_the_optimizer_are_named_with_both_counts(counts: tuple[int, ...], said: str) -> None:
    assert complaint(*[(head(num_steps=count), [U, U]) for count in counts]).startswith(f"optimizer.step() {said}")


@pytest.mark.parametrize("others", [(1, 1), (1, -1), (-1, -1)])
def test_even_steps_of_the_optimizer_are_fine(others: tuple[int, int]) -> None:
    rows = [(head(num_steps=count), [U, U]) for count in (1, *others)]
    check_headers(headers(*rows, (head(num_steps=5, flags=Flag.SHADOW), [U, U])), ["w", "b"], (0, 1, 2, 3))


def test_a_group_of_shadows_agrees() -> None:
    check_headers(headers((head(flags=Flag.SHADOW), [T]), (head(flags=Flag.SHADOW), [T])), ["w"], (0, 1))


def test_a_parameter_frozen_on_some_ranks_is_named_with_all_ranks() -> None:
    said = complaint((head(), [U, U]), (head(), [U, 0]), (head(), [U, U]))
    assert said.startswith('parameter 1 ("b") requires a gradient on ranks 10 and 12 but not on rank 11')
    assert "in the same step on every rank" in said


# The same through the engine: every rank raises, with the same text


def train(change: str) -> list[str]:
    """Two steps; before the second, rank 1 does something of its own. What each rank heard."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    sync = gs.attach(model)
    batch = torch.randn(5, 3)
    heard = []
    for step in range(2):
        try:
            if step == 1:
                alone(change, sync, model, batch)
            model(batch).square().mean().backward()
        except gs.GradSyncError as error:
            heard.append(f"{type(error).__name__}: {error}")
            heard.append(str([parameter.grad for parameter in model.parameters()]))
    sync.detach()
    return heard


def alone(change: str, sync: gs.GradSync, model: torch.nn.Sequential, batch: torch.Tensor) -> None:
    if change == "weighted":
        sync.set_batch_weight(1.0 + dist.get_rank())
    if dist.get_rank() == 0:
        return
    if change == "freeze":
        model[1].bias.requires_grad_(False)
    else:
        with sync.no_sync():
            model(batch).square().mean().backward()


def test_freezing_a_parameter_on_one_rank_is_the_same_error_on_all(run: Any) -> None:
    one, other = run(train, "freeze")
    assert one[0] == other[0]
    assert one[0].startswith('Disagreement: parameter 3 ("1.bias") requires a gradient on rank 0 but not on rank 1; ')


def test_a_backward_under_no_sync_on_one_rank_is_the_same_error_on_all(run: Any) -> None:
    one, other = run(train, "no_sync")
    assert one == other
    assert one[0].startswith(
        "Disagreement: rank 1 ran 2 backward calls since the last synchronization but rank 0 ran 1"
    )
    assert one[1] == "[None, None, None, None]", "a failed step leaves no gradient"


def test_a_backward_under_no_sync_on_one_rank_is_fine_with_weights(run: Any) -> None:
    assert run(train, "weighted") == [[], []]
