"""Does a schedule add up? Run it with sets of ranks instead of numbers, and see."""

from __future__ import annotations

from gradsync.algorithms.schedule import Round, Schedule
from gradsync.errors import listed


def check(schedule: Schedule) -> None:
    """Prove that a schedule is an all-reduce, or raise a `ValueError` that says where it is not.

    Proven, for every chunk:
      1. no addition counts a contribution twice;
      2. nothing is passed on as the result before every contribution has arrived in it;
      3. the sum is complete at one place first, and copied from there: all ranks end with equal bits;
      4. no copy goes to a rank that has the result, or meets an addition in the same round;
      5. in the end every rank has every contribution.

    >>> from gradsync.algorithms.check import check
    >>> from gradsync.algorithms.schedule import Schedule, Transfer
    >>> check(Schedule(2, 1, ((Transfer(1, 0, 0, add=True),),)))
    Traceback (most recent call last):
    ValueError: after the last round rank 1 lacks the contribution of rank 0 to chunk 0
    """
    everyone = (1 << schedule.world_size) - 1
    # held[rank][chunk]: whose contributions are in it, bit r for rank r.
    held = [[1 << rank] * schedule.num_chunks for rank in range(schedule.world_size)]
    formed: dict[int, int] = {}
    for number, transfers in enumerate(schedule.rounds, 1):
        try:
            _play(transfers, held, everyone, formed)
        except ValueError as error:
            raise ValueError(f"round {number}: {error}") from None
    for rank, chunks in enumerate(held):
        for chunk, has in enumerate(chunks):
            if has != everyone:
                raise ValueError(
                    f"after the last round rank {rank} lacks the contribution of "
                    f"{listed(_ranks(everyone & ~has))} to chunk {chunk}"
                )


def _play(transfers: Round, held: list[list[int]], everyone: int, formed: dict[int, int]) -> None:
    sent = [held[t.src][t.chunk] for t in transfers]  # as it stood before the round
    added = set()
    for t, incoming in zip(transfers, sent, strict=True):
        own = held[t.dst][t.chunk]
        if t.add:
            if own & incoming:
                raise ValueError(
                    f"rank {t.dst} gets the contribution of {listed(_ranks(own & incoming))} to chunk {t.chunk} "
                    f"a second time, from rank {t.src}"
                )
            if own | incoming == everyone and formed.setdefault(t.chunk, t.dst) != t.dst:
                raise ValueError(
                    f"the sum of chunk {t.chunk} is formed at rank {t.dst}, but was formed at rank "
                    f"{formed[t.chunk]} before; the two may differ in their last bits"
                )
            added.add((t.dst, t.chunk))
            held[t.dst][t.chunk] = own | incoming
            continue
        if incoming != everyone:
            raise ValueError(
                f"rank {t.src} passes chunk {t.chunk} on to rank {t.dst} before the contribution of "
                f"{listed(_ranks(everyone & ~incoming))} has arrived"
            )
        if own == everyone or (t.dst, t.chunk) in added:
            raise ValueError(
                f"rank {t.src} sends the sum of chunk {t.chunk} to rank {t.dst}, which has it or adds to it already"
            )
        held[t.dst][t.chunk] = everyone


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
