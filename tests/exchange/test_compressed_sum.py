"""gs.all_reduce(compress=...): near the truth, the same bits on every rank, in place; nothing is kept between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.compress.recipe import Compressor

EVERY: dict[str, Compressor] = {
    "fp16": gs.fp16(),
    "bf16": gs.bf16(),
    "error_feedback": gs.error_feedback(gs.bf16()),
    "int8": gs.int8(),
    "int4": gs.int4(block=64),
    "stochastic": gs.int8(rounding="stochastic"),
    "sign": gs.sign(block=64),
    "topk": gs.topk(0.5, block=64),
    "randomk": gs.randomk(0.5),
    "powersgd": gs.powersgd(4),
    "warmup": gs.warmup(gs.int8(), 1000),  # one call has no steps to warm up in
    "by_parameter": gs.by_parameter([gs.rule(dims=2, compress=gs.int8())], default=gs.bf16()),
    "across_hosts": gs.across_hosts(gs.sign()),
}
DRAWN = ("stochastic", "randomk")  # other numbers are drawn in every call
# How far from the truth the result may be, relative to its norm, for gaussian numbers. What is sent of a part of the
# elements, or of the directions, is a coarse picture of them.
BOUNDS = dict.fromkeys(EVERY, 0.02) | {
    "int4": 0.2, "sign": 0.8, "topk": 0.6, "randomk": 1.5, "powersgd": 1.0, "across_hosts": 1e-6,
}  # fmt: skip
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matrix": lambda x: x.reshape(48, 40),
    "vector": lambda x: x[:1001],
    "transposed": lambda x: x.reshape(48, 40).t(),
    "every third": lambda x: x[::3],
    "channels last": lambda x: x.reshape(4, 20, 4, 6).contiguous(memory_format=torch.channels_last),
    "one": lambda x: x[:1],
    "scalar": lambda x: x[0],
    "empty": lambda x: x[:0],
}


def data(rank: int) -> torch.Tensor:
    return torch.randn(1920, generator=torch.Generator().manual_seed(rank))


def assert_same_bits(tensor: torch.Tensor, what: str) -> None:
    theirs = tensor.detach().clone().contiguous()
    dist.broadcast(theirs, 0)
    assert torch.equal(tensor, theirs), f"{what}: other bits than rank 0"


def check_every_form(name: str, op: Any) -> None:
    ranks = range(dist.get_world_size())
    for form_name, form in FORMS.items():
        what = f"{name}, {form_name}"
        tensor = form(data(dist.get_rank()))
        strides, address = tensor.stride(), tensor.data_ptr()
        result = gs.all_reduce(tensor, op=op, compress=EVERY[name])
        assert result is tensor, what
        assert (tensor.stride(), tensor.data_ptr()) == (strides, address), what
        assert_same_bits(result, what)
        truth = torch.stack([form(data(rank)) for rank in ranks]).double().sum(0)
        truth = truth / len(ranks) if op == "mean" else truth
        if tensor.dim() and tensor.numel() > 1:
            assert (result.double() - truth).norm() <= BOUNDS[name] * truth.norm(), what
        else:
            torch.testing.assert_close(result.double(), truth, rtol=0.02, atol=0.02, msg=what)


@pytest.mark.parametrize("name", EVERY)
def test_it_is_near_the_truth_in_place_and_the_same_everywhere(name: str, run: Any) -> None:
    run(check_every_form, name, "mean", ranks=2)
    run(check_every_form, name, "sum", ranks=3)


def call_twice() -> None:
    mine = data(dist.get_rank()).reshape(48, 40)
    for name, compress in EVERY.items():
        first = gs.all_reduce(mine.clone(), compress=compress)
        gs.all_reduce(mine.reshape(60, 32).clone() * 3, compress=compress)  # another form in between
        second = gs.all_reduce(mine.clone(), compress=compress)
        third = gs.all_reduce(mine.clone(), compress=compress)
        assert torch.equal(first, second) == (name not in DRAWN), name
        assert torch.equal(second, third) == (name not in DRAWN), name


def test_nothing_is_kept_from_one_call_to_the_next(run: Any) -> None:
    run(call_twice)


def pass_exactly() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, compress in EVERY.items():
        for dtype in (torch.int64, torch.int32, torch.uint8):
            whole = torch.arange(40, dtype=dtype) + rank
            expected = torch.arange(40, dtype=dtype) * size + sum(range(size))
            assert torch.equal(gs.all_reduce(whole, op="sum", compress=compress), expected), f"{name} {dtype}"
        numbers = torch.complex(torch.arange(40.0), torch.full((40,), float(rank)))
        mean = torch.complex(torch.arange(40.0), torch.full((40,), (size - 1) / 2))
        assert torch.equal(gs.all_reduce(numbers, compress=compress), mean), name
        assert torch.equal(gs.all_reduce(numbers.conj(), compress=compress), mean.conj()), name


def test_whole_and_complex_numbers_travel_exactly(run: Any) -> None:
    run(pass_exactly)


def reduce_other_precisions() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        for name, compress in EVERY.items():
            mine = data(dist.get_rank()).reshape(48, 40).to(dtype)
            result = gs.all_reduce(mine, compress=compress)
            truth = torch.stack([data(rank).reshape(48, 40) for rank in range(dist.get_world_size())]).mean(0)
            assert result.dtype == dtype
            assert_same_bits(result, f"{name} {dtype}")
            assert (result.float() - truth).norm() <= (BOUNDS[name] + 0.01) * truth.norm(), f"{name} {dtype}"


def test_every_precision_is_served(run: Any) -> None:
    run(reduce_other_precisions)


def reduce_nan() -> None:
    for name, compress in EVERY.items():
        spoiled = data(dist.get_rank()).reshape(48, 40)
        if dist.get_rank() == 1:
            spoiled[20, 3] = torch.nan
        assert not gs.all_reduce(spoiled, compress=compress).isfinite().all(), f"{name}: the NaN is hidden"
        clean = gs.all_reduce(data(dist.get_rank()).reshape(48, 40), compress=compress)
        assert clean.isfinite().all(), f"{name}: a NaN is left over"


def test_a_nan_reaches_every_rank_and_is_gone_afterwards(run: Any) -> None:
    run(reduce_nan, ranks=3)


def disagree(first: Compressor | None, second: Compressor | None) -> tuple[str, float]:
    """What this rank hears; and a right call right after."""
    try:
        gs.all_reduce(torch.ones(3), compress=second if dist.get_rank() == 1 else first)
        said = "nothing"
    except gs.Disagreement as error:
        said = str(error)
    return said, float(gs.all_reduce(torch.full((8,), float(dist.get_rank())), op="sum", compress=gs.int8())[0])


@pytest.mark.parametrize(
    ("first", "second"),
    [(gs.int8(), gs.int4()), (gs.topk(0.1), gs.topk(0.2)), (gs.bf16(), None)],
    ids=["int8 and int4", "two densities", "bf16 and none"],
)
def test_other_compressors_on_other_ranks_are_the_same_error_on_all(
    first: Compressor | None, second: Compressor | None, run: Any
) -> None:
    found = run(disagree, first, second, ranks=3)
    assert found == [found[0]] * 3
    assert found[0][0].startswith("all_reduce was called with different tensors (rank 0: float32[3] mean")
    assert found[0][1] == pytest.approx(3, rel=0.01)
