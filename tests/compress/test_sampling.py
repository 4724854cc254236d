"""Random-k: the same few elements on every rank, spread evenly, each in its turn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import end_of, lay_out, names

from gradsync.compress.param import Span
from gradsync.compress.randomk import RandomK

buckets = st.dictionaries(names, st.integers(0, 300), max_size=4)
densities = st.sampled_from([0.001, 0.07, 0.3, 0.5, 1.0])
some = settings(max_examples=60, deadline=None)


@some
@given(density=densities, sizes=buckets, step=st.integers(0, 1 << 40))
def test_one_of_each_stratum_is_sent(density: float, sizes: dict[str, int], step: int) -> None:
    codec, spans = RandomK(density), lay_out(sizes, gap=5)
    strata = codec.strata(spans)
    indices = strata.indices(step)
    assert len(indices) == sum(codec.count(numel) for numel in sizes.values())
    assert ((strata.begin <= indices) & (indices < strata.begin + strata.length)).all()
    covered = [i for b, n in zip(strata.begin.tolist(), strata.length.tolist(), strict=True) for i in range(b, b + n)]
    assert covered == [i for span in spans for i in range(span.start, span.start + span.numel)]
    for length in strata.length.split([codec.count(numel) for numel in sizes.values()]):
        assert not len(length) or length.max() - length.min() <= 1


@some
@given(density=densities, sizes=buckets, step=st.integers(0, 1000), data=st.data())
def test_what_is_sent_of_a_parameter_depends_on_it_alone(
    density: float, sizes: dict[str, int], step: int, data: st.DataObject
) -> None:
    codec = RandomK(density, seed=4)
    spans = lay_out({name: sizes[name] for name in data.draw(st.permutations(list(sizes)))}, begin=64, gap=3)
    drawn = codec.strata(spans).indices(step).split([codec.count(span.numel) for span in spans])
    for span, indices in zip(spans, drawn, strict=True):
        alone = codec.strata([Span(span.name, 0, span.numel)]).indices(step)
        assert torch.equal(indices - span.start, alone)


def test_steps_seeds_and_parameters_draw_differently() -> None:
    draws = [
        RandomK(0.1, seed).strata([Span(name, 0, 1000)]).indices(step).tolist()
        for name in ("a", "b")
        for seed in (0, 1)
        for step in (0, 1)
    ]
    assert len({tuple(draw) for draw in draws}) == len(draws)


@pytest.mark.parametrize("numel", [7, 40, 101])
def test_a_gradient_is_right_on_average_when_weighted_by_its_stratum(numel: int) -> None:
    strata = RandomK(0.3).strata([Span("weight", 0, numel)])
    grad, num_steps = torch.arange(1.0, numel + 1), 1000
    arrived = torch.zeros(numel)
    for step in range(num_steps):
        indices = strata.indices(step)
        arrived[indices] += grad[indices] * strata.length
    # Each arrives with probability 1 / 4 or more: five deviations of its mean.
    assert ((arrived / num_steps - grad).abs() <= 5 * grad * (3 / num_steps) ** 0.5).all()


def test_with_feedback_a_constant_gradient_arrives() -> None:
    spans = lay_out({"a": 50, "b": 9})
    strata = RandomK(0.2).strata(spans)
    grad = torch.zeros(end_of(spans))
    for span in spans:
        grad[span.start : span.start + span.numel] = torch.linspace(-1, 1, span.numel)
    residual, arrived, num_steps = torch.zeros_like(grad), torch.zeros_like(grad), 500
    for step in range(num_steps):
        residual += grad
        indices = strata.indices(step)
        arrived[indices] += residual[indices]
        residual[indices] = 0
    torch.testing.assert_close(arrived + residual, num_steps * grad, rtol=1e-4, atol=1e-4)
    assert ((arrived / num_steps - grad).abs() <= 0.1).all()
