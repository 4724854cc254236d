"""Recursive halving and doubling: the ring's bytes in 2·log2 n rounds, if n is a power of two.

Eight chunks, eight ranks; in each round partners exchange halves of what they still answer for.

    halving, each adds what comes                        doubling, each keeps what comes
    round   1            2            3                  4, 5, 6: the same exchanges back, in reverse order
    0 ⇄ 1   4-7 ⇄ 0-3
    0 ⇄ 2                2-3 ⇄ 0-1                        neighbours exchange most, so the largest
    0 ⇄ 4                             1 ⇄ 0               messages stay inside a host

Other counts fold first: with p the largest power of two in n, the first 2(n − p) ranks stand in pairs, of
which one gives all it has to the other, waits, and gets the result.

    fold     1 ▶ 0  3 ▶ 2       5 ranks: p = 4, one pair; 6 ranks: p = 4, two pairs
    then     halving and doubling among 0, 2, 4, 5
    unfold   0 ▶ 1  2 ▶ 3

With α, β, γ the seconds per message, per byte and per byte added: 2·log2 p·α + 2(p−1)/p·Sβ + (p−1)/p·Sγ, and
for the fold, if there is one, 2α + 2Sβ + Sγ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.algorithms.schedule import Round, Schedule, Transfer
from gradsync.cluster import as_hosts


@dataclass(frozen=True)
class HalvingDoubling:
    """The recipe that `halving_doubling()` makes."""

    def schedule(self, hosts: int | Sequence[Sequence[int]]) -> Schedule:
        """Neighbours in host order are partners first, when the messages are largest."""
        ranks = [rank for host in as_hosts(hosts) for rank in host]
        num_bits = len(ranks).bit_length() - 1
        num_chunks = 1 << num_bits
        num_folded = len(ranks) - num_chunks
        folded, staying = ranks[1 : 2 * num_folded : 2], ranks[: 2 * num_folded : 2] + ranks[2 * num_folded :]
        rounds = [_exchange(staying, num_bits, bit, add=True) for bit in range(num_bits)]
        rounds += [_exchange(staying, num_bits, bit, add=False) for bit in reversed(range(num_bits))]
        if folded:
            pairs = list(zip(folded, staying, strict=False))
            fold = tuple(Transfer(away, home, chunk, True) for away, home in pairs for chunk in range(num_chunks))
            unfold = tuple(Transfer(home, away, chunk, False) for away, home in pairs for chunk in range(num_chunks))
            rounds = [fold, *rounds, unfold]
        return Schedule(len(ranks), num_chunks, tuple(rounds))


def halving_doubling() -> HalvingDoubling:
    """Partners at distance 1, 2, 4 … exchange halves: best for small data and powers of two.

    >>> len(halving_doubling().schedule(8).rounds), len(halving_doubling().schedule(9).rounds)
    (6, 8)
    """
    return HalvingDoubling()


def _exchange(ranks: Sequence[int], num_bits: int, bit: int, add: bool) -> Round:
    """Rank i meets i ^ 2**bit. Adding, it sends the half its partner answers for; copying, the half it has.

    Before round `bit` of halving, rank i answers for the chunks whose upper `bit` bits are i's lower ones,
    mirrored: one run of chunks. The round's bit decides who answers for which half of that run.
    """
    transfers = []
    for i, rank in enumerate(ranks):
        partner = i ^ (1 << bit)
        answers = partner if add else i
        mirrored = sum((answers >> b & 1) << (bit - b) for b in range(bit + 1))
        width = 1 << (num_bits - bit - 1)
        run = range(mirrored * width, (mirrored + 1) * width)
        transfers += [Transfer(rank, ranks[partner], chunk, add) for chunk in run]
    return tuple(transfers)
