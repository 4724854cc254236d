"""Compressors of every kind, and n ranks in one process that exchange what they make of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

import gradsync as gs
from gradsync.compress.blocks import BlockCodec, partition
from gradsync.compress.integers import Int4, Int8
from gradsync.compress.param import Param, Span
from gradsync.compress.recipe import Compressor
from gradsync.compress.sign import Sign
from gradsync.compress.topk import TopK
from gradsync.kernels.block_kernels import Mode, decode, encode

LEAVES: tuple[Compressor, ...] = (
    gs.fp16(),
    gs.bf16(),
    gs.int8(),
    gs.int8(block=32, rounding="stochastic", seed=7),
    gs.int4(),
    gs.int4(block=65536, feedback=False),
    gs.sign(),
    gs.sign(block=64, feedback=False),
    gs.topk(0.01),
    gs.topk(1.0, block=128, feedback=False),
    gs.randomk(0.1),
    gs.randomk(1e-05, seed=3, feedback=False),
    gs.powersgd(),
    gs.powersgd(rank=1, min_ratio=1.5, seed=9, feedback=False),
)
COMPRESSORS: tuple[Compressor, ...] = (
    *LEAVES,
    gs.error_feedback(gs.bf16()),
    gs.warmup(gs.across_hosts(gs.int8()), 100),
    gs.across_hosts(gs.error_feedback(gs.warmup(gs.sign(feedback=False), 3))),
    gs.by_parameter(
        [
            gs.rule("*embed*", compress=None),
            gs.rule(dims=1, compress=gs.bf16()),
            gs.rule(min_numel=100, compress=gs.warmup(gs.powersgd(2), 5)),
        ],
        default=gs.topk(0.05),
    ),
    gs.error_feedback(gs.by_parameter({"*.bias": None, "*": gs.int4(rounding="stochastic")})),
)
BLOCK_CODECS: tuple[BlockCodec, ...] = (
    Int8(32),
    Int8(64, "stochastic", seed=5),
    Int4(32),
    Int4(128, "stochastic"),
    Sign(32),
    Sign(64),
    TopK(0.1, 64),
    TopK(0.5, 32),
    TopK(1.0, 32),
)

names = st.text(st.sampled_from("abw.01_é𝛼"), min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
params = st.builds(Param, names, shapes, dtypes)


@st.composite
def rule_lists(draw: st.DrawFn, inner: st.SearchStrategy[Compressor]) -> Compressor:
    patterns = draw(st.lists(names.map("{}*".format), min_size=1, max_size=3, unique=True))
    rules = [
        gs.rule(
            pattern,
            compress=draw(st.none() | inner),
            min_numel=draw(st.integers(0, 1)),
            dims=draw(st.none() | st.integers(0, 4)),
        )
        for pattern in patterns
    ]
    return gs.by_parameter(rules, default=draw(st.none() | inner))


compressors: st.SearchStrategy[Compressor] = st.recursive(
    st.sampled_from(LEAVES)
    | st.builds(gs.topk, st.floats(1e-9, 1), st.sampled_from([32, 4096]), st.booleans())
    | st.builds(gs.powersgd, st.integers(1, 64), st.floats(1, 1e6), st.integers(0, 2**32 - 1), st.booleans()),
    lambda inner: st.one_of(
        st.builds(gs.error_feedback, inner),
        st.builds(gs.warmup, inner, st.integers(1, 10_000)),
        st.builds(gs.across_hosts, inner),
        rule_lists(inner),
    ),
    max_leaves=6,
)


def lay_out(sizes: dict[str, int], begin: int = 0, gap: int = 0) -> list[Span]:
    """Parameters one after the other, each on a border of 16 elements, after so many more that are no one's."""
    spans = []
    for name, numel in sizes.items():
        begin = -(-(begin + gap) // 16) * 16
        spans.append(Span(name, begin, numel))
        begin += numel
    return spans


def end_of(spans: Sequence[Span]) -> int:
    return max((span.start + span.numel for span in spans), default=0)


def one_phase(
    codec: BlockCodec, spans: Sequence[Span], grads: torch.Tensor, residuals: torch.Tensor, step: int = 0
) -> torch.Tensor:
    """Every rank sends its code of everything to everyone, who add up; `grads` and `residuals` have a row per rank."""
    table = partition(codec, spans, 1).whole
    payloads = torch.zeros(len(grads), table.nbytes, dtype=torch.uint8)
    for rank, payload in enumerate(payloads):
        encode(codec.code(), grads[rank], residuals[rank], table, payload, Mode.FEEDBACK, codec.key(step, rank))
    total = torch.zeros_like(grads[0])
    decode(codec.code(), payloads, table, total)
    return total


def two_phase(
    codec: BlockCodec, spans: Sequence[Span], grads: torch.Tensor, residuals: torch.Tensor, step: int = 0
) -> torch.Tensor:
    """Every rank sends each owner its part, who adds up, codes the sum again and sends it to everyone."""
    whole, parts, part_nbytes = partition(codec, spans, len(grads))
    payloads = torch.zeros(len(grads), whole.nbytes, dtype=torch.uint8)
    for rank, payload in enumerate(payloads):
        encode(codec.code(), grads[rank], residuals[rank], whole, payload, Mode.FEEDBACK, codec.key(step, rank))
    sums = torch.zeros(1, whole.nbytes, dtype=torch.uint8)
    for owner, part in enumerate(parts):
        here = slice(owner * part_nbytes, (owner + 1) * part_nbytes)
        own = torch.zeros_like(grads[0])
        decode(codec.code(), payloads[:, here], part, own)
        encode(codec.code(), own, residuals[owner], part, sums[0, here], Mode.ABSORB, codec.key(step, -1))
    total = torch.zeros_like(grads[0])
    decode(codec.code(), sums, whole, total)
    return total


PHASES = (one_phase, two_phase)
