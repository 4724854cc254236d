"""What every compressor keeps to, whatever it is made of."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import COMPRESSORS, LEAVES, compressors, params

import gradsync as gs
from gradsync.compress import by_parameter, cast, integers, powersgd, randomk, sign, topk, wrappers
from gradsync.compress.blocks import BlockCodec, partition
from gradsync.compress.cast import Cast
from gradsync.compress.param import Param, Span
from gradsync.compress.powersgd import PowerSGD, matrix, start_q
from gradsync.compress.randomk import RandomK, payload_dtype
from gradsync.compress.recipe import EXACT, Codec, Compressor
from gradsync.kernels.block_kernels import Mode, encode

every = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
modules = (by_parameter, cast, integers, powersgd, randomk, sign, topk, wrappers)
some = settings(max_examples=50, deadline=None)


@every
def test_it_is_data(compressor: Compressor) -> None:
    assert isinstance(compressor, Compressor)
    again = eval(repr(compressor), {name: value for module in modules for name, value in vars(module).items()})
    for twin in (again, copy.deepcopy(compressor), pickle.loads(pickle.dumps(compressor))):  # noqa: S301  # our own
        assert twin == compressor
        assert hash(twin) == hash(compressor)
        assert repr(twin) == repr(compressor)


def test_no_two_are_equal() -> None:
    assert len(set(COMPRESSORS)) == len(COMPRESSORS)


@some
@given(compressor=compressors, param=params)
def test_it_decides_the_same_every_time(compressor: Compressor, param: Param) -> None:
    choice = compressor.choose(param)
    twin = pickle.loads(pickle.dumps(compressor)).choose(param)  # noqa: S301  # our own
    assert choice == twin
    assert hash(choice) == hash(twin)
    assert choice.codec is None or isinstance(choice.codec, Codec)
    assert choice == EXACT or choice.codec is not None, "what is not compressed is plainly exact"


@every
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int64, torch.bool], ids=str)
def test_what_is_not_real_goes_as_it_is(compressor: Compressor, dtype: torch.dtype) -> None:
    assert compressor.choose(Param("weight", (256, 256), dtype)) == EXACT


@some
@given(compressor=st.sampled_from(LEAVES), param=params)
def test_nbytes_is_the_length_of_the_payload(compressor: Compressor, param: Param) -> None:
    choice = compressor.choose(param)
    assert choice.nbytes(param) == payload_nbytes(choice.codec, param)


def payload_nbytes(codec: Codec | None, param: Param) -> int:
    """By making the payload."""
    flat = torch.randn(param.numel).to(param.dtype)
    match codec:
        case None:
            return flat.nbytes
        case Cast():
            return flat.to(codec.dtype).nbytes
        case RandomK():
            indices = codec.strata([Span(param.name, 0, param.numel)]).indices(step=0)
            return flat[indices].to(payload_dtype(param.dtype)).nbytes
        case PowerSGD():
            q = start_q(param, codec.rank, codec.seed)
            return torch.mm(flat.float().view(matrix(param.shape)), q).nbytes + q.nbytes
        case BlockCodec():
            table = partition(codec, [Span(param.name, 0, param.numel)], 1).whole
            payload = torch.full((table.nbytes + 64,), 0xAA, dtype=torch.uint8)
            encode(codec.code(), flat, None, table, payload, Mode.NONE, codec.key(0))
            assert (payload[table.nbytes :] == 0xAA).all(), "not a byte beyond"
            return table.nbytes
    raise AssertionError(codec)


@pytest.mark.parametrize(
    ("compressor", "ratio"),
    [
        (gs.fp16(), 2),
        (gs.bf16(), 2),
        (gs.int8(), 3.9),
        (gs.int4(), 7.7),
        (gs.sign(), 28),
        (gs.topk(0.01), 73),
        (gs.topk(0.01, block=8192), 96),
        (gs.randomk(0.01), 99),
        (gs.powersgd(4), 128),
    ],
    ids=repr,
)
def test_it_saves_what_its_page_says(compressor: Compressor, ratio: float) -> None:
    weight = Param("weight", (1024, 1024))
    assert weight.nbytes / compressor.choose(weight).nbytes(weight) >= ratio


def test_sixteen_bits_do_not_shrink_to_sixteen() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert gs.fp16().choose(Param("weight", (64,), dtype)) == EXACT
        assert gs.bf16().choose(Param("weight", (64,), dtype)) == EXACT
    assert gs.bf16().choose(Param("weight", (64,), torch.float64)).label == "bf16"


def test_rounding_to_the_nearest_has_feedback_and_at_random_has_none() -> None:
    weight = Param("weight", (64, 64))
    for factory in (gs.int8, gs.int4):
        assert factory().choose(weight).feedback
        assert not factory(rounding="stochastic").choose(weight).feedback
        assert not factory(feedback=False).choose(weight).feedback
        assert factory(rounding="stochastic", feedback=True).choose(weight).feedback


def test_any_order_of_wrappers_is_the_same_choice() -> None:
    weight, inner = Param("weight", (64, 64)), gs.int8(feedback=False)
    one = gs.warmup(gs.across_hosts(gs.error_feedback(inner)), 10)
    other = gs.error_feedback(gs.across_hosts(gs.warmup(inner, 10)))
    assert one.choose(weight) == other.choose(weight)
    assert one.choose(weight).exact_steps == 10
    assert one.choose(weight).across
    assert one.choose(weight).feedback


def test_a_wrapper_twice_is_the_wrapper_once() -> None:
    assert gs.error_feedback(gs.int8()) == gs.int8()
    assert gs.error_feedback(gs.error_feedback(gs.bf16())) == gs.error_feedback(gs.bf16())
    assert gs.across_hosts(gs.across_hosts(gs.bf16())) == gs.across_hosts(gs.bf16())
    assert gs.warmup(gs.warmup(gs.bf16(), 30), 20).choose(Param("weight", (64,))).exact_steps == 30


def test_wrappers_leave_alone_what_goes_as_it_is() -> None:
    wrapped = gs.error_feedback(gs.warmup(gs.across_hosts(gs.by_parameter({"*.bias": None}, gs.int8())), 10))
    assert wrapped.choose(Param("head.bias", (64,))) == EXACT
