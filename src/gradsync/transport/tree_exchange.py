"""The messages that ranks send up the control tree and down again: in each subgroup one of fixed size.

    up      row, row, row ─merge→ row, row ─merge→ row       who leads a subgroup merges what its members bring
    down                            row ─→ row, row ─→ row, row, row

A merge makes one row of many, so that every message is as long as the first, however many ranks there are. Where all
rows are wanted themselves, which is rare, they are put behind each other on the way up. A rank has one role in that, or
two: it brings what those below it say, and perhaps it listens to others further up, in [Who leads] of `control_tree`.

Note [Nobody waits in the tree]
    A rank that leads goes on when its members' rows are there, from the thread of gloo that brought them, whatever its
    own thread does: others may wait for it. So one operation is on its way at a time, in the order in which they were
    asked for, which is the same on every rank: a channel has no other way to tell them apart.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from gradsync.algorithms.control_tree import ControlTree, Subgroup
from gradsync.transport.pending import BoardMessage, GatheredRows, Pending, Promise
from gradsync.transport.shared_memory import Team

Merge = Callable[[torch.Tensor], torch.Tensor]  # rows into one row
Ask = Callable[[torch.Tensor], bool]  # whether what was merged is not enough: then every rank's row is wanted


def merge_bits(rows: torch.Tensor) -> torch.Tensor:
    """Every bit that any row has.

    >>> merge_bits(torch.tensor([[1, 4], [2, 4]], dtype=torch.uint8)).tolist()
    [3, 4]
    """
    return torch.from_numpy(np.bitwise_or.reduce(rows.numpy(), axis=0))


def comparable(word: bytes) -> torch.Tensor:
    """A row by which ranks find out whether all bring the same word: it, and its inverse."""
    inverse = ~int.from_bytes(word, "little") & ((1 << 8 * len(word)) - 1)
    return torch.frombuffer(bytearray(word + inverse.to_bytes(len(word), "little")), dtype=torch.uint8)


def all_same(rows: torch.Tensor) -> bool:
    """Return whether these rows, merged ones perhaps, are of one word: no bit is set in one and not in another.

    >>> all_same(torch.stack([comparable(b"ab")] * 3)), all_same(torch.stack([comparable(b"ab"), comparable(b"ac")]))
    (True, False)
    """
    words, inverses = (int.from_bytes(bytes(half.numpy()), "little") for half in merge_bits(rows).chunk(2))
    return not words & inverses


class SubgroupChannel(Protocol):
    """The channel over which a subgroup talks; a work is one of torch's, or anything with `get_future()`."""

    def collect(self, rows: torch.Tensor | None, row: torch.Tensor) -> Any:
        """Fill the first member's `rows` with every member's `row`."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        """Make `tensor` that of the member with index `source`, in place."""


class TreeMessage(Promise):
    """An operation on its way: `rows` is what came of it, once it has landed."""

    def __init__(self, what: str, nbytes: int) -> None:
        super().__init__(what, nbytes, -1)
        self.rows = torch.empty(0, nbytes, dtype=torch.uint8, device="cpu")

    def came(self, rows: torch.Tensor) -> None:
        """Take the rows that came of it."""
        self.rows = rows
        self.finish()


Walk = Generator[Any, None, None]  # yields each work that must end before it goes on
Members = list[tuple[Subgroup, SubgroupChannel]]
Role = tuple[Members, Members]  # the subgroups that a rank leads, from the bottom, and the one where it is told


class TreeExchange:
    """This rank's part in the tree."""

    def __init__(self, tree: ControlTree, rank: int, subgroups: Sequence[tuple[Subgroup, SubgroupChannel]]) -> None:
        self._tree = tree
        self._rank = rank
        self._subgroups = list(subgroups)
        self._lock = threading.RLock()  # a work that has ended already goes on in the thread that asks
        self._queue: deque[tuple[TreeMessage, Walk]] = deque()  # the first is on its way
        self._error: Exception | None = None

    def reduce(self, row: torch.Tensor, merge: Merge, what: str, ask: Ask | None = None, above: int = 0) -> TreeMessage:
        """Start making one row of all; `above` is how many subgroups, from the bottom, did that already.

        Where `ask` says so of the merged row, alike on all ranks, every rank's own row comes in its place: at once and
        in the same operation, since ranks may launch other things before they wait for this.
        """
        message = TreeMessage(what, row.numel())
        return self._start(message, self._merging(message, row, merge, ask, above))

    def gather(self, row: torch.Tensor, what: str) -> TreeMessage:
        """Start bringing every rank's row to every rank, by index in the group."""
        message = TreeMessage(what, row.numel())
        return self._start(message, self._joining(message, row))

    # The two ways

    def _merging(self, message: TreeMessage, mine: torch.Tensor, merge: Merge, ask: Ask | None, above: int) -> Walk:
        row, roles, sent = mine, self._roles(above), []
        for led, upward in roles:
            for subgroup, channel in led:
                rows = torch.empty(len(subgroup.members), row.numel(), dtype=torch.uint8, device="cpu")
                yield channel.collect(rows, row)
                row = merge(rows[1:] if subgroup.listens else rows)
            sent += [channel.collect(None, row) for _, channel in upward]  # the answer comes behind it
        for led, upward in reversed(roles):
            for _, channel in upward:
                row = torch.empty_like(row)
                yield channel.broadcast(row, 0)
            yield from _tell_below(led, row)
        del sent
        if ask is not None and ask(row):
            yield from self._joining(message, mine)
        else:
            message.came(row[None])

    def _joining(self, message: TreeMessage, row: torch.Tensor) -> Walk:
        nbytes, size = row.numel(), len(self._tree.order)
        whole, roles, sent = row, self._roles(0), []
        for led, upward in roles:
            for subgroup, channel in led:
                counts = self._counts[subgroup]
                rows = torch.empty(len(counts), max(counts) * nbytes, dtype=torch.uint8, device="cpu")
                yield channel.collect(rows, _padded(whole[: counts[0] * nbytes], max(counts) * nbytes))
                whole = torch.cat([each[: count * nbytes] for each, count in zip(rows, counts, strict=True)])
            for subgroup, channel in upward:
                # Members speak for unequally many: gloo wants equal lengths.
                sent.append(channel.collect(None, _padded(whole, max(self._counts[subgroup]) * nbytes)))
        for led, upward in reversed(roles):
            for _, channel in upward:
                whole = torch.empty(size * nbytes, dtype=torch.uint8, device="cpu")
                yield channel.broadcast(whole, 0)
            yield from _tell_below(led, whole)
        del sent
        rows = whole.view(size, nbytes)
        if not self._tree.in_order:
            order = torch.tensor(self._tree.order, dtype=torch.int64, device="cpu")
            rows = torch.empty_like(rows).index_copy_(0, order, rows)
        message.came(rows)

    def _roles(self, above: int) -> list[Role]:
        """A rank leads some subgroups and is told in others: which, on the way up, but for the lowest few."""
        roles: list[Role] = [([], [])]
        for each in self._subgroups[above:]:
            if roles[-1][1]:
                roles.append(([], []))  # it has said its own: what it leads from here on it only listens to
            led, upward = roles[-1]
            (led if each[0].leader == self._rank else upward).append(each)
        return roles

    @cached_property
    def _counts(self) -> dict[Subgroup, list[int]]:
        """The number of ranks for which each member of our subgroups speaks."""
        below = self._tree.below
        return {
            subgroup: [len(below(member, subgroup.level)) for member in subgroup.members]
            for subgroup, _ in self._subgroups
        }

    # One after the other: see [Nobody waits in the tree]

    def _start(self, message: TreeMessage, walk: Walk) -> TreeMessage:
        with self._lock:
            self._queue.append((message, walk))
            if self._error is not None:
                self._fail(self._error)
            elif len(self._queue) == 1:
                self._go_on()
        return message

    def _go_on(self) -> None:
        """Go as far as there is nothing to wait for; the lock is held."""
        while self._queue:
            message, walk = self._queue[0]
            try:
                work = next(walk, None)
                if work is not None:
                    work.get_future().add_done_callback(self._ended)
                    return
                assert message.succeeded, "a walk ends with what came of it"
            except Exception as error:
                self._fail(error)
                return
            self._queue.popleft()

    def _ended(self, future: Any) -> None:
        with self._lock:
            try:
                future.value()
            except Exception as error:
                self._fail(error)
                return
            self._go_on()

    def _fail(self, error: Exception) -> None:
        """End all messages by this error, as nothing goes on after it: ranks no longer know where the others are."""
        self._error = error
        while self._queue:
            message, walk = self._queue.popleft()
            walk.close()
            message.finish(error)


def _tell_below(led: Members, row: torch.Tensor) -> Walk:
    yield from [channel.broadcast(row, 0) for _, channel in reversed(led)]  # all at once, then waited for


def _padded(rows: torch.Tensor, nbytes: int) -> torch.Tensor:
    padded = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    padded[: rows.numel()] = rows
    return padded


class BoardedMessage(Pending):
    """A row of all: first and last on the boards of each host, between them by the tree, from one rank of each host.

    Whoever waits does it, as the boards want it: see [Waiting] in `waiting`.
    """

    def __init__(
        self, team: Team, tree_exchange: TreeExchange, row: torch.Tensor, merge: Merge, what: str, ask: Ask | None
    ) -> None:
        super().__init__(what, row.numel())
        self.rows = row[None]
        self._team, self._tree_exchange, self._row, self._merge, self._ask = team, tree_exchange, row, merge, ask
        self._asked: TreeMessage | None = None  # for every rank's row
        self._mates = torch.empty(team.size, row.numel(), dtype=torch.uint8, device="cpu")
        self._between: TreeMessage | None = None
        self._told = False  # whether the second message is on the boards
        self._error: Exception | None = None
        team.post(row)

    def landed(self, slice_s: float) -> bool:
        try:
            while not self.succeeded and self._error is None:
                if not self._take_turn(slice_s):
                    return False
        except Exception as error:
            self._error = error
        return True

    def settle(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_turn(self, slice_s: float) -> bool:
        """Do one of the waits, for at most a slice, and return whether it is over."""
        team = self._team
        if self._asked is not None:
            if not self._asked.landed(slice_s):
                return False
            self._asked.settle()
            self.rows, self.succeeded = self._asked.rows, True
        elif self._between is not None and not self._told:
            if not self._between.landed(slice_s):
                return False
            self._between.settle()
            self._tell(self._between.rows[0])
        elif team.collect(self._mates, slice_s):
            if self._told:
                self._hear(self._mates[0])
            elif team.rank == 0:
                mates = self._merge(self._mates)
                self._between = self._tree_exchange.reduce(mates, self._merge, self.what, above=1)
            else:
                self._tell(self._mates[team.rank])  # who leads has something to say: the others only take part
        else:
            return False
        return True

    def _hear(self, merged: torch.Tensor) -> None:
        """Take what came of all; ranks alone on a host asked for more by now, and nothing of ours comes between."""
        if self._ask is not None and self._ask(merged):
            self._asked = self._tree_exchange.gather(self._row, self.what)
        else:
            self.rows, self.succeeded = merged[None], True

    def _tell(self, row: torch.Tensor) -> None:
        self._team.post(row)
        self._told = True


RowsPending = GatheredRows | BoardMessage | TreeMessage | BoardedMessage  # once landed, `rows` is what ranks said
