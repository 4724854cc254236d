"""What is looked for in gradients: the first NaN or Inf with its count, and a digest by which equal data is seen."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import gradsync as gs
from gradsync.agreement.header import NO_DIGEST, Head, Headers, pack_header
from gradsync.compress.recipe import EXACT
from gradsync.engine.bucket import Bucket, GradEntry
from gradsync.engine.clock_offset import ClockOffset, estimate
from gradsync.engine.exit_notice import going_on
from gradsync.engine.nonfinite import (
    NonfinitePlace,
    digest_of,
    first_nonfinite,
    is_finite,
    made_by_compression,
    warn_if_same_data,
)
from gradsync.engine.shared_backward import side_by_side
from gradsync.transport.blame import PeerView
from gradsync.transport.heartbeat import Phase, RankState

NAN, INF = float("nan"), float("inf")


def entries_of(*grads: Any) -> list[GradEntry]:
    entries = []
    for index, grad in enumerate(grads):
        tensor = torch.as_tensor(grad if grad is not None else [0.0])
        param = nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype))
        if grad is not None:
            param.grad = tensor
        entries.append(GradEntry(index, f"p{index}", param, {}, "", False))
    return entries


def test_the_first_parameter_with_a_nan_is_found_with_its_count() -> None:
    entries = entries_of([1.0, 2.0], [INF, 1.0, NAN, -INF], [NAN])
    pairs = [(entry, entry.param.grad) for entry in entries if entry.param.grad is not None]
    assert first_nonfinite(pairs) == NonfinitePlace(1, 3)
    assert first_nonfinite(pairs[2:]) == NonfinitePlace(2, 1)
    assert first_nonfinite(pairs[:1]) == NonfinitePlace() == NonfinitePlace(-1, 0)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([NAN]), (3,), check_invariants=True)
    assert first_nonfinite([(entries[0], sparse)]) == NonfinitePlace(0, 1)
    assert is_finite(torch.ones(3))
    assert not is_finite(torch.tensor([1.0, NAN]))


def bucket_of(compress: Any, *grads: list[float]) -> Bucket:
    entries = entries_of(*grads)
    choice = EXACT if compress is None else compress.choose(entries[0].item.param)
    bucket = Bucket(0, entries, False, choice)
    bucket.place(bucket.form.zeros())
    for entry in entries:
        assert entry.param.grad is not None
        entry.view.copy_(entry.param.grad)
    return bucket


def test_what_compression_made_is_told_by_the_parameter_and_of_no_exact_bucket() -> None:
    good, bad = [1.0, 2.0], [NAN, 1.0, INF]
    assert made_by_compression([bucket_of(None, good, bad), bucket_of(gs.int8(), good)]) is None
    found = made_by_compression([bucket_of(gs.int8(), good), bucket_of(gs.int8(), good, bad)])
    assert found is not None
    assert found.text == "int8 made NaN or Inf of the average gradient of p1"
    assert found[1:] == ([], "p1", 2)


def test_a_digest_tells_gradients_apart_by_every_bit_and_leaves_out_what_is_none() -> None:
    digest = digest_of(entries_of([1.0, 2.0], None, [3.0]))
    assert len(digest) == 8
    assert digest == digest_of(entries_of([1.0, 2.0], None, [3.0]))
    for other in (
        ([1.0, 2.5], None, [3.0]),
        ([1.0, 2.0], None, [4.0]),
        ([-1.0, 2.0], None, [3.0]),
        ([1.0, 2.0], None, None),
    ):
        assert digest_of(entries_of(*other)) != digest
    for kind in (torch.float16, torch.float64, torch.complex64):
        assert digest_of(entries_of(torch.ones(3, 2, dtype=kind).t())) != NO_DIGEST
    assert digest_of(entries_of(None, None)) == NO_DIGEST
    assert digest_of(entries_of([0.0, 0.0], torch.ones(0))) == NO_DIGEST
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (3,), check_invariants=True)
    assert digest_of(entries_of([1.0], sparse)) == digest_of(entries_of([1.0]))
    many = torch.ones((1 << 20) + 1)
    assert digest_of(entries_of(many)) != digest_of(entries_of(many[1:]))


def warned(*digests: bytes) -> bool:
    rows = [pack_header(Head(0, 0, 1.0, 1, -1, 1, 0, digest), bytearray(1)) for digest in digests]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_same_data(Headers(torch.stack(rows)))
    return any("every rank seems to see the same data" in str(each.message) for each in caught)


def test_equal_first_gradients_are_warned_of_where_there_are_several_and_they_say_something() -> None:
    one, other = b"12345678", b"12345679"
    assert warned(one, one, one)
    assert not warned(one, other, one)
    assert not warned(one)
    assert not warned(NO_DIGEST, NO_DIGEST)


def test_an_offset_lies_in_the_middle_of_the_tightest_bounds() -> None:
    """Rank 1's clock is 10 behind: messages take 1 there and 3 back, and in another round 2 and 2."""
    rounds = [[(100.0, 0.0), (90.0, 0.0)], [(110.0, 103.0), (100.0, 91.0)], [(120.0, 112.0), (110.0, 102.0)]]
    assert estimate(rounds, 1) == ClockOffset(10.5, 1.5)
    assert estimate(rounds[1:], 1) == ClockOffset(10.0, 2.0)


def test_who_goes_on_is_in_a_step_that_this_one_does_not_come_to() -> None:
    def view(step: int, phase: Phase) -> PeerView:
        return PeerView(RankState(0, step, phase, -1, ()), dead=False, silent=False)

    views = {1: view(4, Phase.WAITING), 3: view(5, Phase.WAITING), 4: view(6, Phase.BACKWARD), 5: view(9, Phase.LEFT)}
    assert going_on(views, 5) == [3, 4]


@pytest.mark.parametrize("num", [1, 2, 4])
def test_those_that_end_are_followed_up_and_the_first_error_is_raised(num: int) -> None:
    followed: list[int] = []
    errors = {1: ArithmeticError("one"), 2: ValueError("two")}

    def wait(number: int) -> None:
        if number in errors:
            raise errors[number]

    waits = [(lambda n=n: wait(n), lambda n=n: followed.append(n)) for n in range(num)]
    if num == 1:
        side_by_side(waits)
    else:
        with pytest.raises(ArithmeticError, match="one"):
            side_by_side(waits)
    assert followed == [n for n in range(num) if n not in errors]


def test_whether_gradients_are_made_is_the_same_on_every_thread() -> None:
    seen: list[bool] = []
    for makes in (True, False):
        with torch.set_grad_enabled(makes):
            side_by_side([(lambda: seen.append(torch.is_grad_enabled()), lambda: None)] * 3)
    assert seen == [True] * 3 + [False] * 3
