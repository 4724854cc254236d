"""n ranks that exchange codes of blocks lose nothing: what was not delivered is in someone's residual."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import BLOCK_CODECS, PHASES, end_of, lay_out, names, one_phase, two_phase

from gradsync.compress.blocks import BlockCodec
from gradsync.compress.integers import Int4, Int8
from gradsync.compress.param import Span
from gradsync.compress.sign import Sign
from gradsync.compress.topk import TopK

Exchange = Callable[..., torch.Tensor]
codecs = st.sampled_from(BLOCK_CODECS)
phases = st.sampled_from(PHASES)
buckets = st.dictionaries(names, st.integers(0, 300), min_size=1, max_size=4)
seeds = st.integers(0, 1 << 30)
some = settings(max_examples=50, deadline=None)
every_codec = pytest.mark.parametrize("codec", BLOCK_CODECS, ids=repr)
both_ways = pytest.mark.parametrize("exchange", PHASES, ids=lambda phase: phase.__name__)


def gaussian(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@some
@given(exchange=phases, codec=codecs, sizes=buckets, num_ranks=st.integers(1, 5), seed=seeds)
def test_originals_are_delivered_or_kept(
    exchange: Exchange, codec: BlockCodec, sizes: dict[str, int], num_ranks: int, seed: int
) -> None:
    spans = lay_out(sizes)
    residuals = torch.zeros(num_ranks, end_of(spans))
    for step in range(3):
        grads = gaussian(seed + step, num_ranks, end_of(spans))
        before = residuals.double().sum(0)
        delivered = exchange(codec, spans, grads, residuals, step)
        for span in spans:
            here = slice(span.start, span.start + span.numel)
            came = (grads.double().sum(0) + before)[here]
            went = (delivered.double() + residuals.double().sum(0))[here]
            # An fp32 rounding for each addition, of numbers that are at most some tens.
            torch.testing.assert_close(went, came, rtol=0, atol=num_ranks * 30 * 2.0**-23)


@some
@given(exchange=phases, codec=codecs, sizes=buckets, num_ranks=st.integers(1, 4), seed=seeds, data=st.data())
def test_a_parameter_fares_the_same_in_any_bucket(
    exchange: Exchange, codec: BlockCodec, sizes: dict[str, int], num_ranks: int, seed: int, data: st.DataObject
) -> None:
    grads = {name: gaussian(seed + i, num_ranks, numel) for i, (name, numel) in enumerate(sizes.items())}
    order = data.draw(st.permutations(list(sizes)))
    together = fare(exchange, codec, lay_out({name: sizes[name] for name in order}, begin=48, gap=20), grads)
    for name, numel in sizes.items():
        alone = fare(exchange, codec, [Span(name, 0, numel)], grads)
        assert torch.equal(alone[name][0], together[name][0]), "what is delivered, bit by bit"
        assert torch.equal(alone[name][1], together[name][1]), "and what every rank keeps"


def fare(
    exchange: Exchange, codec: BlockCodec, spans: list[Span], grads: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter's delivered sum and residuals after two steps."""
    num_ranks = len(next(iter(grads.values())))
    flat, residuals = (torch.zeros(num_ranks, end_of(spans)) for _ in range(2))
    places = {span.name: slice(span.start, span.start + span.numel) for span in spans}
    for name, place in places.items():
        flat[:, place] = grads[name]
    for step in range(2):
        delivered = exchange(codec, spans, flat, residuals, step)
    return {name: (delivered[place], residuals[:, place]) for name, place in places.items()}


@every_codec
@both_ways
def test_what_is_between_parameters_is_never_touched(exchange: Exchange, codec: BlockCodec) -> None:
    spans = lay_out({"a": 33, "b": 70}, gap=20)
    grads, residuals = torch.full((2, end_of(spans)), torch.nan), torch.full((2, end_of(spans)), 7.0)
    inside = torch.zeros(end_of(spans), dtype=torch.bool)
    for span in spans:
        inside[span.start : span.start + span.numel] = True
    grads[:, inside], residuals[:, inside] = 1.0, 0.0
    delivered = exchange(codec, spans, grads, residuals)
    assert delivered.isfinite().all()
    assert (delivered[~inside] == 0).all()
    assert (residuals[:, ~inside] == 7.0).all()


@every_codec
@both_ways
def test_a_constant_gradient_arrives_on_average(exchange: Exchange, codec: BlockCodec) -> None:
    spans = lay_out({"a": 100, "b": 17})
    grads = gaussian(1, 3, end_of(spans))
    exact = grads.double().sum(0)
    residuals, arrived = torch.zeros_like(grads), torch.zeros_like(exact)
    errors = {}
    for step in range(1, 401):
        arrived += exchange(codec, spans, grads, residuals, step)
        errors[step] = max(
            float((arrived / step - exact)[span.start : span.start + span.numel].abs().max()) for span in spans
        )
    # The slowest is `sign`: what is far larger than its block's mean waits until the others have waited as long.
    assert errors[400] <= 0.1 * float(exact.abs().max())
    assert errors[400] <= errors[100] / 2 + 1e-6, "and ever less, about as one over the number of steps"


@pytest.mark.parametrize("codec", [Sign(32), TopK(0.1, 64), Int4(64)], ids=repr)
def test_without_feedback_a_constant_gradient_does_not_arrive(codec: BlockCodec) -> None:
    """The mirror of the law above: it would not hold by accident."""
    spans = lay_out({"a": 128})
    grads = gaussian(1, 1, 128)
    arrived = sum(one_phase(codec, spans, grads, torch.zeros_like(grads), step) for step in range(50))
    assert float((arrived / 50 - grads[0]).abs().max()) > 0.02 * float(grads.abs().max())


@pytest.mark.parametrize("codec", [Int8(64, "stochastic"), Int4(64, "stochastic")], ids=repr)
def test_rounding_at_random_is_right_on_average_without_feedback(codec: BlockCodec) -> None:
    spans = lay_out({"a": 64})
    grads, num_steps = gaussian(3, 2, 64), 1000
    arrived = torch.zeros(64)
    for step in range(num_steps):
        arrived += one_phase(codec, spans, grads, torch.zeros_like(grads), step)
    levels = 127 if isinstance(codec, Int8) else 7
    grain = float(grads.abs().max()) / levels
    # Two roundings of a deviation of at most half a grain each, and five of those deviations.
    assert float((arrived / num_steps - grads.sum(0)).abs().max()) <= 5 * grain / (2 * num_steps) ** 0.5


@some
@given(density=st.sampled_from([0.01, 0.1, 0.5, 1.0]), numel=st.integers(1, 200), seed=seeds)
def test_top_k_delivers_the_largest_of_each_block(density: float, numel: int, seed: int) -> None:
    codec, grad = TopK(density, 32), gaussian(seed, 1, numel)
    delivered = one_phase(codec, [Span("weight", 0, numel)], grad, torch.zeros_like(grad))
    for value, sent in zip(grad[0].split(32), delivered.split(32), strict=True):
        largest = value.abs().bfloat16().sort(descending=True).values[: codec.kept(len(value))]
        assert torch.equal(sent.abs().sort(descending=True).values[: len(largest)].bfloat16(), largest)
        assert int((sent != 0).sum()) <= len(largest)
        assert torch.equal(sent[sent != 0], value.bfloat16().float()[sent != 0])


@every_codec
def test_a_nan_is_seen_once_and_then_gone(codec: BlockCodec) -> None:
    spans = lay_out({"a": 64, "b": 64})
    grads, residuals = gaussian(2, 2, end_of(spans)), torch.zeros(2, end_of(spans))
    two_phase(codec, spans, grads, residuals, 0)
    spoiled = grads.clone()
    spoiled[1, 3] = torch.nan
    delivered = two_phase(codec, spans, spoiled, residuals, 1)
    assert delivered[:64].isnan().any()
    assert delivered[64:].isfinite().all(), "the other parameter does not notice"
    assert residuals.isfinite().all()
    assert two_phase(codec, spans, grads, residuals, 2).isfinite().all()
