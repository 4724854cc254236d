"""Who sends to whom: a permutation in every round, and push-sum over it keeps every sum; with exact numbers."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.pace.gossip import neighbours, num_strides
from gradsync.plan.paces import Topology

topologies = st.sampled_from(["ring", "exponential"])
sizes = st.integers(2, 64)
unhurried = settings(deadline=None, max_examples=50)


def push_sum(topology: Topology, held: list[Fraction], number: int) -> list[Fraction]:
    """What each rank holds after the round: half of its own, and half of its sender's."""
    size = len(held)
    return [(held[r] + held[neighbours(topology, r, size, number).sender]) / 2 for r in range(size)]


@unhurried
@given(topologies, sizes, st.integers(0, 1 << 40))
def test_every_rank_has_one_sender_and_one_receiver_and_none_is_itself(
    topology: Topology, size: int, number: int
) -> None:
    every = [neighbours(topology, rank, size, number) for rank in range(size)]
    assert sorted(each.receiver for each in every) == list(range(size))
    for rank, each in enumerate(every):
        assert rank not in each.peers
        assert every[each.receiver].sender == rank
        assert every[each.sender].receiver == rank


@unhurried
@given(topologies, sizes, st.integers(0, 100))
def test_neighbours_are_so_of_each_other(topology: Topology, size: int, number: int) -> None:
    """Otherwise one would wait for the word of one that tells it to somebody else."""
    for rank in range(size):
        for peer in neighbours(topology, rank, size, number).peers:
            assert rank in neighbours(topology, peer, size, number).peers


@unhurried
@given(sizes, st.integers(0, 1000))
def test_exponential_strides_bring_every_rank_word_of_every_other_in_as_many_rounds_as_there_are(
    size: int, first: int
) -> None:
    heard = [{rank} for rank in range(size)]
    for number in range(first, first + num_strides(size)):
        senders = [neighbours("exponential", rank, size, number).sender for rank in range(size)]
        heard = [heard[rank] | heard[sender] for rank, sender in enumerate(senders)]
    assert all(len(each) == size for each in heard)


@unhurried
@given(st.integers(1, 6), st.integers(0, 1000))
def test_exponential_strides_make_the_exact_mean_of_a_power_of_two(log: int, first: int) -> None:
    held = [Fraction(rank**2) for rank in range(1 << log)]
    mean = sum(held) / len(held)
    for number in range(first, first + log):
        held = push_sum("exponential", held, number)
    assert held == [mean] * len(held)


@unhurried
@given(topologies, st.lists(st.fractions(-100, 100, max_denominator=64), min_size=2, max_size=64))
def test_rounds_keep_the_sum_and_bring_ranks_no_further_apart(topology: Topology, held: list[Fraction]) -> None:
    total, weights, widths = sum(held), [Fraction(1)] * len(held), [max(held) - min(held)]
    for number in range(8):
        held, weights = push_sum(topology, held, number), push_sum(topology, weights, number)
        widths.append(max(held) - min(held))
        assert sum(held) == total
        assert weights == [1] * len(held)
    assert all(after <= before for before, after in pairwise(widths))


@unhurried
@given(topologies, st.integers(2, 9))
def test_many_rounds_bring_all_ranks_to_the_mean(topology: Topology, size: int) -> None:
    held = [Fraction(rank) for rank in range(size)]
    for number in range(2 * size * size):
        held = push_sum(topology, held, number)
    assert max(held) - min(held) < Fraction(1, 100)
