"""The protocol without a wire: any speed of the workers and any order of the messages keeps the bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.pace.async_sgd.messages import OwnerAnswer, pack, unpack
from gradsync.pace.async_sgd.owner import Owner
from gradsync.pace.async_sgd.shard import Shard
from gradsync.pace.async_sgd.staleness import Clocks, staleness_bound
from gradsync.plan.paces import AsyncSGD

NUM_PUSHES = 6


def gradient(worker: int, clock: int) -> torch.Tensor:
    """Sums of these depend on their order."""
    return torch.tensor([0.1 * 3.0**worker / clock])


class Worker:
    """Pushes and pulls in turn until it has pushed enough; told what to do next by the play."""

    def __init__(self, number: int, num_owners: int) -> None:
        self.number = number
        self.clock = 0
        self.versions = [0] * num_owners
        self.answers: dict[int, OwnerAnswer] = {}
        self.left = False
        self.asked = False

    @property
    def waits(self) -> bool:
        return self.asked and len(self.answers) < len(self.versions)

    @property
    def done(self) -> bool:
        return self.left or (self.clock >= NUM_PUSHES and not self.waits)


class Play:
    """Some workers, as many owners, and messages on their way between each pair, in order."""

    def __init__(self, size: int, options: AsyncSGD) -> None:
        self.options = options
        self.workers = [Worker(number, size) for number in range(size)]
        self.masters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(size)]
        self.optimizers = [torch.optim.SGD([m], lr=0.5, momentum=0.9) for m in self.masters]
        self.shards = [Shard([("w", m)], [o]) for m, o in zip(self.masters, self.optimizers, strict=True)]
        self.owners = [
            Owner(shard, size, options, partial(self.answer, owner)) for owner, shard in enumerate(self.shards)
        ]
        self.messages: dict[tuple[int, int], deque[Callable[[], None]]] = {
            (worker, owner): deque() for worker in range(size) for owner in range(size)
        }
        self.distances: list[int] = []

    def answer(self, owner: int, worker: int, read: OwnerAnswer) -> None:
        """An owner lets the worker read: how far is it ahead, by the true clocks of all that still push?"""
        live = [w.clock for w in self.workers if not w.left]
        self.distances.append(self.workers[worker].clock - min(live, default=self.workers[worker].clock))
        self.workers[worker].answers[owner] = read

    def act(self, worker: Worker, leaves: bool) -> None:
        """The worker's next move, if it has one."""
        if worker.done or worker.waits:
            return
        if worker.asked:
            worker.versions = [worker.answers[owner].version for owner in range(len(self.owners))]
        worker.clock, worker.asked, worker.answers = worker.clock + 1, True, {}
        payload = pack([gradient(worker.number, worker.clock)])
        for number, owner in enumerate(self.owners):
            messages = self.messages[worker.number, number]
            messages.append(partial(owner.push, worker.number, worker.clock, worker.versions[number], payload))
            messages.append(
                partial(owner.leave, worker.number) if leaves else partial(owner.pull, worker.number, worker.clock)
            )
        worker.left = leaves

    def go_on(self, choice: int, leaves: bool) -> bool:
        """One thing that can happen does: a message arrives or a worker moves. False: nothing can."""
        arrivals = [messages for messages in self.messages.values() if messages]
        movers = [w for w in self.workers if not w.done and not w.waits]
        if not arrivals and not movers:
            return False
        choice %= len(arrivals) + len(movers)
        if choice < len(arrivals):
            arrivals[choice].popleft()()
        else:
            self.act(movers[choice - len(arrivals)], leaves)
        return True

    def drain(self) -> list[torch.Tensor]:
        """All meet; what each worker then reads of each shard."""
        for worker in self.workers:
            worker.answers = {}
            for owner in self.owners:
                owner.drain(worker.number, worker.clock, True)
        payloads = [[worker.answers[o].payload for o in range(len(self.owners))] for worker in self.workers]
        read = [[unpack(f, [self.masters[0]])[0] for f in each] for each in payloads]
        assert all(each == read[0] for each in read)
        return [value for value in read[0] if value is not None]


PLAYS = st.tuples(
    st.integers(1, 3),
    st.sampled_from([0, 1, 2, None]),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 15)), max_size=200),
)


@settings(max_examples=80, deadline=None)
@given(play=PLAYS, extras=st.sampled_from([(None, None), (0.04, None), (None, "1/staleness")]))
def test_nobody_reads_too_far_ahead_nothing_is_too_stale_and_all_get_done(
    play: tuple[int, int | None, list[tuple[int, int]]], extras: tuple[float | None, str | None]
) -> None:
    size, s, choices = play
    stage = Play(size, AsyncSGD(s, *extras))
    for choice, dice in choices:
        stage.go_on(choice, leaves=dice == 0)
    while stage.go_on(0, leaves=False):  # messages first, then workers in order
        pass
    assert all(worker.done for worker in stage.workers), "the protocol is stuck"
    for owner in stage.owners:
        stats = owner.stats()
        assert stats["staleness_bound"] == staleness_bound(s, size)
        if s is not None:
            assert max(stage.distances, default=0) <= s
            assert stats["staleness_max"] <= stats["staleness_bound"]
    stage.drain()
    num_pushes = sum(worker.clock for worker in stage.workers)
    versions = {shard.version for shard in stage.shards}
    assert versions == {max(worker.clock for worker in stage.workers) if s == 0 else num_pushes}


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 3), choices=st.lists(st.integers(0, 11), max_size=150))
def test_without_staleness_no_order_of_letters_changes_a_bit(size: int, choices: list[int]) -> None:
    stage = Play(size, AsyncSGD(0))
    for choice in choices:
        stage.go_on(choice, leaves=False)
    while stage.go_on(0, leaves=False):
        pass
    by_hand = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([by_hand], lr=0.5, momentum=0.9)
    for clock in range(1, NUM_PUSHES + 1):
        by_hand.grad = gradient(0, clock) / size
        for worker in range(1, size):
            by_hand.grad = by_hand.grad + gradient(worker, clock) / size
        optimizer.step()
    assert all(torch.equal(value, by_hand) for value in stage.drain())


def test_the_bound_of_staleness_is_met_exactly() -> None:
    """Worker 1 reads while worker 0 is s behind; worker 0 then goes on as far as it may before 1 pushes again."""
    s = 2
    stage = Play(2, AsyncSGD(s))
    zero, one = stage.workers

    def deliver() -> None:
        for messages in stage.messages.values():
            while messages:
                messages.popleft()()

    for _ in range(s):
        stage.act(one, leaves=False)
        deliver()
    assert not one.waits
    while not zero.waits:
        stage.act(zero, leaves=False)
        deliver()
        if zero.clock == 2 * s + 1:
            break
    stage.act(one, leaves=False)
    deliver()
    assert stage.owners[0].stats()["staleness_max"] == staleness_bound(s, 2) == 5


def test_a_level_clock_forgets_who_was_behind() -> None:
    clocks = Clocks(2)
    clocks.advance(0, 1)
    clocks.level(1, [True, False])
    clocks.advance(0, 2)
    assert (clocks.slowest, clocks.slowest_workers(), clocks.num_live) == (2, [0], 1)
