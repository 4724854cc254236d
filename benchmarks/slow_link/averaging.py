"""The mean of many ranks' gradients in one process, through the very code that ranks run on a network.

A bucket's route (`gradsync.exchange.bucket_route`) encodes, asks its participants for a round and yields; here all
ranks' routes go abreast, and a round is played when every rank has asked for it:

    rank 0   encode ─ asks ┐              ┌ decode
    rank 1   encode ─ asks ┤ `Table.play` ┤ decode
    rank 2   encode ─ asks ┘              └ decode
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT, Choice, Compressor
from gradsync.exchange.bucket_route import BucketRoute, RoutedBucket
from gradsync.exchange.flat import FlatBucket, Form, Item, lay_out
from gradsync.trace.tally import CodecTally

Tensors = Sequence[torch.Tensor]


class Averaging:
    """Gradients of `num_ranks` ranks in, their mean out. Holds what compressors keep between steps."""

    def __init__(self, parameters: dict[str, torch.Tensor], compress: Compressor | None, num_ranks: int) -> None:
        by_choice: dict[Choice, list[str]] = {}
        for name, parameter in parameters.items():
            choice = EXACT if compress is None else compress.choose(Param(name, tuple(parameter.shape)))
            by_choice.setdefault(choice, []).append(name)
        self._convoys = [
            Convoy({name: parameters[name] for name in names}, choice, num_ranks) for choice, names in by_choice.items()
        ]
        self._step = 0

    def mean(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What every rank would have now, by name, from what each brings: a row of `gradients`.

        Overwritten in the next step.
        """
        found: dict[str, torch.Tensor] = {}
        for convoy in self._convoys:
            convoy.load(gradients)
            found |= average(convoy, self._step)
        self._step += 1
        return found


class Convoy:
    """Parameters that travel in one way: a flat bucket and a route for each rank."""

    def __init__(self, parameters: dict[str, torch.Tensor], choice: Choice, num_ranks: int) -> None:
        self.choice = choice
        # Like shapes side by side: PowerSGD takes them at once.
        named = sorted(parameters.items(), key=lambda pair: tuple(pair[1].shape))
        self.items, (numel, _, device) = lay_out([Item.like(name, parameter) for name, parameter in named])
        self._flats = torch.zeros(num_ranks, numel, device=device)
        self.flat_buckets = [FlatBucket(0, flat, self.items, choice) for flat in self._flats]
        self.table = Table(num_ranks)
        self.routes: list[BucketRoute] = []
        self.tally = CodecTally()
        if choice.codec is not None:
            for rank, flat_bucket in enumerate(self.flat_buckets):
                flat_bucket.begin_keeping()
                seat = Seat(self.table, rank)
                rounds = choice.codec.rounds(RoutedBucket(flat_bucket, seat, device))
                self.routes.append(BucketRoute(flat_bucket, rounds, seat, self.tally))

    def load(self, gradients: dict[str, torch.Tensor]) -> None:
        """Divided by the number of ranks, as the engine does: what is averaged is a sum."""
        for item in self.items:
            mine = gradients[item.name].flatten(1)
            torch.div(mine, len(mine), out=self._flats[:, item.start : item.start + mine.shape[1]])


def average(convoy: Convoy, step: int) -> dict[str, torch.Tensor]:
    """The gradients of all ranks through their compressor; the first time exactly, as the engine does."""
    flats = [flat_bucket.flat for flat_bucket in convoy.flat_buckets]
    if convoy.choice.codec is None or step < max(1, convoy.choice.exact_steps):
        _sum(flats)
    else:
        # Not `zip`, which would leave all but the first unfinished after their last round.
        for _ in zip_longest(*(route.go(step) for route in convoy.routes)):
            convoy.table.play()
        convoy.tally.events.clear()  # a GPU's clock, which nobody reads here
    return {item.name: item.of(flats[0]) for item in convoy.items}


class Table:
    """Where the ranks' requests for a round meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._asked: list[tuple[Callable[..., None], tuple[torch.Tensor, ...]]] = []

    def ask(self, act: Callable[..., None], *tensors: torch.Tensor) -> None:
        self._asked.append((act, tensors))

    def play(self) -> None:
        """All ranks have asked for the same."""
        asked, self._asked = self._asked, []
        assert len(asked) == self.size, f"{len(asked)} of {self.size} ranks asked for this round"
        asked[0][0](*(list(column) for column in zip(*(tensors for _, tensors in asked), strict=True)))


class Seat:
    """A rank's place at the table: a `gradsync.exchange.participants.Participants`."""

    in_memory = False  # as between hosts: two phases where they send less

    def __init__(self, table: Table, rank: int) -> None:
        self.size, self.rank = table.size, rank
        self._table = table

    def sum(self, flat: torch.Tensor, bucket: int) -> None:
        self._table.ask(_sum, flat)

    def gather(self, rows: torch.Tensor, bucket: int) -> None:
        self._table.ask(_gather, rows)

    def trade(self, rows: torch.Tensor, mine: torch.Tensor, bucket: int) -> None:
        self._table.ask(_trade, rows, mine)

    def sum_share(self, form: Form) -> float:
        return 2 * (self.size - 1) / self.size

    def sum_way(self, form: Form) -> str:
        return "played"

    def for_sums(self, form: Form) -> torch.Tensor:
        return torch.zeros(form.numel, dtype=form.dtype, device=form.device)

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)


def _sum(flats: Tensors) -> None:
    """In the order of the ranks, in their own dtype."""
    total = flats[0]
    for flat in flats[1:]:
        total += flat
    for flat in flats[1:]:
        flat.copy_(total)


def _gather(rows: Tensors) -> None:
    whole = torch.stack([mine[rank] for rank, mine in enumerate(rows)])
    for each in rows:
        each.copy_(whole)


def _trade(rows: Tensors, mine: Tensors) -> None:
    for rank, each in enumerate(rows):
        for other, theirs in enumerate(mine):
            each[other] = theirs.view(len(rows), -1)[rank]
