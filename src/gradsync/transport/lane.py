"""One ordered lane: what is launched here is launched in the same order on every rank.

What takes one call is issued at once, from the thread that calls, and runs beside the computation: gloo has
threads of its own, NCCL a stream, shared memory a worker. No Python thread stands between a full bucket and
them; one would need the interpreter, which costs up to 5 ms beside a busy Python thread. Only what takes
several turns (rounds of messages, hosts and then across, tensors of GPUs on gloo) goes by the lane's thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradsync.algorithms.control_tree import ControlTree
from gradsync.cluster import Hosts
from gradsync.errors import GradSyncError, NotEnoughMemory, SyncTimeout, listed
from gradsync.kernels.library import MAX_RANKS, load
from gradsync.plan.guard import Guard
from gradsync.transport.abandoned import AbandonedLane, abandon, end_later
from gradsync.transport.connecting import Attempt
from gradsync.transport.groups import Groups, group_of
from gradsync.transport.lane_thread import LaneThread
from gradsync.transport.liveness import Liveness
from gradsync.transport.pending import BoardMessage, GatheredRows, LaneTask, Pending, pending_of
from gradsync.transport.session import Session
from gradsync.transport.shared_memory import Team
from gradsync.transport.stream_watch import StreamWatch
from gradsync.transport.stream_work import StreamWork
from gradsync.transport.tree_exchange import (
    Ask,
    BoardedMessage,
    Merge,
    RowsPending,
    TreeExchange,
    all_same,
    comparable,
    merge_bits,
)
from gradsync.transport.waiting import LaneWait

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P", bound=Pending)

_STORE_S = 5.0  # how much longer we wait for the store: a meeting has its own bound, and names who did not come
_ASKED_FROM = 32  # so many works on streams may stay known beyond their end
_CLOSING_S = 1.0  # for a thread to end, after what it was handed


def open_lane(parent: dist.ProcessGroup, guard: Guard, timeout: float) -> Lane:
    """A lane among the members of `parent`, with the channel for control; every member calls this at once."""
    groups = group_of(parent)
    lane = Lane(groups, Liveness(groups, guard), guard, timeout)
    lane.meet()
    try:
        lane.open_subgroups()
    except BaseException:
        lane.close(together=False)
        raise
    return lane


class Lane:
    """Launches collectives in order and waits for them within bounds."""

    def __init__(
        self,
        groups: Groups,
        liveness: Liveness,
        guard: Guard,
        timeout: float,
        more_time: str = "gs.Guard(timeout=seconds)",
    ) -> None:
        """`more_time` is what a user would write to allow for a longer `timeout`."""
        self.groups = groups
        self.liveness = liveness
        self.session = session = Session(groups, liveness)
        # What everybody asks; as attributes, for they are asked many times a step.
        self.at, self.place, self.fail = session.at, session.place, session.fail
        self.global_ranks, self.name_buckets, self.notice = session.global_ranks, session.name_buckets, session.notice
        self.warn_after = guard.warn_after  # seconds of waiting after which somebody is told
        self._thread_step = threading.local()
        self.timeout = timeout
        self._under_way: deque[Pending] = deque()  # oldest first: an error names the first bucket among them
        self._joining = threading.Lock()  # a thread of the exchange launches too
        self._lane_threads = [LaneThread()]
        self._last_message: BoardMessage | BoardedMessage | None = None
        self._within_hosts: list[Team] = []  # our team, where there is one
        self._boards: Team | None = None  # by whose boards messages to all go: one must be read before the next
        self._wait = LaneWait(session, guard.warn_after, self._under_way, self._within_hosts, more_time)
        self._stream_watch = StreamWatch(session, self._under_way, self._wait, timeout)
        liveness.each_tick(self._stream_watch.look)
        self.has_library = True  # the C library, on every rank
        self.lacks = ""  # why there is no team though ranks share a host
        ours = weakref.WeakMethod(self.connect)  # the groups must not keep the lane
        groups.connect_by(lambda make, what: _held(ours)(make, what))
        # At exit: a collective that fails after the interpreter is gone would crash the process.
        abandoned = AbandonedLane(
            self._under_way, groups, self._within_hosts, self._lane_threads, liveness, os.getpid()
        )
        self._end = weakref.finalize(self, abandon, abandoned)
        self._dropped = weakref.finalize(self, end_later, abandoned, timeout)  # the later one is called first
        self._dropped.atexit = False

    @property
    def step(self) -> int:
        """The step at which the session is."""
        return self.session.step

    # The beginning

    def meet(self) -> None:
        """Find the other ranks, by the store alone; every rank of the group calls this first."""
        patience = self.timeout
        try:
            self.connect(lambda attempt: self.liveness.meet(attempt, patience), "attach", patience + _STORE_S)
        except BaseException as error:
            self.close(together=False)
            if isinstance(error, SyncTimeout) and not error.ranks and self.liveness.absent:
                raise self.liveness.unanswered(patience + _STORE_S) from error
            raise

    def open_subgroups(self) -> None:
        """Make the subgroups by which ranks agree; every rank of the group calls this after they have met."""
        if self.groups.size > 1:
            self.groups.add_subgroups(ControlTree(self.hosts))
            self.liveness.open_links(self.timeout)
            self.connect(self.liveness.hear_all, "the first word of all hosts")

    def connect(self, make: Callable[[Attempt[T]], T], what: str, timeout: float | None = None) -> T:
        """Run `make` in a thread, which may wait for other ranks, and return what it made: see `connecting`."""
        attempt = Attempt(make, what, self.groups.size)
        try:
            attempt.start()
            self.wait(attempt, timeout)
        except BaseException:
            attempt.give_up()
            raise
        return attempt.result()

    # Who shares a host

    @property
    def hosts(self) -> Hosts:
        """The ranks of each host, by index in the group."""
        return self.liveness.hosts

    @property
    def team(self) -> Team | None:
        """The ranks of this host, if they can reduce in shared memory."""
        return self._within_hosts[0] if self._within_hosts else None

    @property
    def one_host(self) -> bool:
        """True if the team is the whole group."""
        return bool(self._within_hosts) and len(self.hosts) == 1

    def open_team(self, board_nbytes: int) -> None:
        """Make the teams of all hosts, if ranks share any; every rank of the group calls this.

        `board_nbytes` is the length of the messages that `merge_all` will carry. Where there is no team though
        ranks share a host, `lacks` says why.
        """
        if self.groups.size == len(self.hosts):
            return
        if (most := max(map(len, self.hosts))) > MAX_RANKS:
            self.lacks = f"{most} ranks share a host, and shared memory serves {MAX_RANKS} at most"
            return
        mine = bytes([load() is not None])
        if not self.same(mine) or not mine[0]:
            lacking = [rank for rank, has in enumerate(self.exchange(mine)) if not has[0]]
            self.has_library = False
            self.lacks = (
                f"gradsync's C library was not built on {listed(self.global_ranks(lacking))} "
                "(install a C compiler, then gradsync again)"
            )
            return
        mates = next(host for host in self.hosts if self.groups.rank in host)
        ours = weakref.WeakMethod(self.exchange)  # the team outlives the lane for a moment: it must not keep it
        pidfds = self.liveness.pidfds()
        try:
            self._within_hosts.append(Team(lambda row: _held(ours)(row), mates, self.groups.rank, pidfds, board_nbytes))
        except NotEnoughMemory as error:
            self.lacks = str(error)
            return
        tree = self.groups.tree
        if self.one_host or (tree is not None and len(mates) > 1 and tree.climb(self.groups.rank)[0].members == mates):
            self._boards = self.team

    # Launching

    @property
    def current_step(self) -> int:
        """The step that a message launched now belongs to: by it ranks of one exchange know each other."""
        date: int | None = getattr(self._thread_step, "step", None)
        return self.session.step if date is None else date

    @contextmanager
    def at_step(self, step: int) -> Iterator[None]:
        """Count what this thread launches inside as part of `step`, though the training loop may be further by now."""
        before, self._thread_step.step = getattr(self._thread_step, "step", None), step
        try:
            yield
        finally:
            self._thread_step.step = before

    def launch(self, issue: Callable[[], dist.Work | StreamWork], what: str, nbytes: int, bucket: int = -1) -> Pending:
        """Issue a collective now; `what` is how an error names it."""
        try:
            pending = pending_of(issue(), what, nbytes, bucket)
        except RuntimeError as error:
            self._raise_if_doomed()
            self._wait.fail(what, bucket, error)
        return self.follow(pending)

    def follow(self, pending: P) -> P:
        """Know of what somebody else has launched: an error may name it, and at the end it is not left alone."""
        with self._joining:
            while self._under_way:
                oldest = self._under_way[0]
                asks = not oldest.on_host and len(self._under_way) > _ASKED_FROM  # a GPU, which takes a while
                if not (oldest.succeeded or oldest.refused or (asks and oldest.landed(0))):
                    break
                self._under_way.popleft()
            self._under_way.append(pending)
        return pending

    def send(self, run: Callable[[], None], what: str, nbytes: int, bucket: int = -1) -> LaneTask:
        """Have the lane's thread do it, after all it was asked for before."""
        task = LaneTask(run, what, nbytes, bucket)
        self.follow(task)
        self._lane_threads[0].take(task)
        return task

    def hire(self) -> LaneThread:
        """One more thread for tasks, which ends with the lane."""
        self._lane_threads.append(LaneThread())
        return self._lane_threads[-1]

    def merge_all(self, row: torch.Tensor, merge: Merge, what: str, ask: Ask | None = None) -> RowsPending:
        """Start making one row of every rank's, by the fastest way there is.

        Where ranks are few, or all on one host, their rows come as they are: to merge `rows` is for the caller.
        Elsewhere they do if `ask` says of the merged row that it is not enough.
        """
        boards = self._boards
        if boards is not None and boards.fits(row):
            self._finish_message()  # the boards hold one message: who sends the next has read the last
            if boards.size == self.groups.size:
                self._last_message = BoardMessage(boards, row, what)
            else:
                self._last_message = BoardedMessage(boards, self.tree_exchange, row, merge, what, ask)
            return self.follow(self._last_message)
        if self._has_tree:
            self._finish_message()
            return self.follow(self.tree_exchange.reduce(row, merge, what, ask))
        return self._gather(row, what)

    def tell_several_at_once(self) -> None:
        """Messages to all will be under way together, so not by the boards; every rank of the group calls this."""
        self._boards = None

    def exchange(self, mine: bytes, what: str = "the agreement between the ranks") -> list[bytes]:
        """Every rank's bytes; all must bring equally many. It grows with the ranks: `same` does not."""
        row = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if self._has_tree:
            self._finish_message()
            gathered: RowsPending = self.follow(self.tree_exchange.gather(row, what))
        else:
            gathered = self._gather(row, what)
        self.wait(gathered)
        return [bytes(each.numpy()) for each in gathered.rows]

    def hear_first(self, row: torch.Tensor, what: str) -> torch.Tensor:
        """Return what the first rank brings, on all; every rank brings as many bytes."""
        mine = row if self.groups.rank == 0 else torch.zeros_like(row)
        merged = self.merge_all(mine, merge_bits, what)
        self.wait(merged)
        return merge_bits(merged.rows)

    def same(self, mine: bytes, what: str = "the agreement between the ranks") -> bool:
        """Return whether all ranks bring the same bytes; all must bring equally many."""
        if self.groups.size == 1:
            return True
        merged = self.merge_all(comparable(mine), merge_bits, what)
        self.wait(merged)
        return all_same(merged.rows)

    @property
    def _has_tree(self) -> bool:
        """True if what ranks agree on goes up and down the tree."""
        tree = self.groups.tree
        return tree is not None and not tree.is_small

    @cached_property
    def tree_exchange(self) -> TreeExchange:
        """This rank's part in the control tree."""
        assert self.groups.tree is not None, "the subgroups are not open"
        return TreeExchange(self.groups.tree, self.groups.rank, self.groups.subgroups)

    def _finish_message(self) -> None:
        """Wait for the last message: from the boards it may have to go by the tree, which keeps its order."""
        if self._last_message is not None:
            self.wait(self._last_message)
            self._last_message = None

    def _gather(self, row: torch.Tensor, what: str) -> GatheredRows:
        rows = torch.empty(self.groups.size, row.numel(), dtype=torch.uint8, device="cpu")
        try:
            gathered = GatheredRows(self.groups.control.gather(rows, row), rows, what)
        except RuntimeError as error:
            self._raise_if_doomed()
            self._wait.fail(what, -1, error)
        return self.follow(gathered)

    def wait(self, pending: Pending, timeout: float | None = None) -> None:
        """Return when the pending's work has completed (nccl: when the stream will wait for it).

        `timeout` in seconds, where it is not the lane's own.
        """
        if self.session.doomed is not None:
            self._raise_if_doomed()
        if pending.on_host and not pending.landed(pending.patience_s):
            self._wait.until(pending, self.timeout if timeout is None else timeout)
        try:
            pending.settle()
        except GradSyncError:
            raise  # it says itself what was wrong, and where
        except RuntimeError as error:
            self._wait.fail(pending.what, pending.bucket, error)

    def run(self, issue: Callable[[], dist.Work | StreamWork], what: str) -> None:
        """Launch and wait."""
        self.wait(self.launch(issue, what, 0))

    @property
    def idle(self) -> bool:
        """True if nothing is under way."""
        return all(pending.landed(0) for pending in list(self._under_way))

    def close(self, together: bool) -> GradSyncError | None:
        """Leave; `together` if all ranks came to this, so that nothing is under way on the host.

        Returns what befell a collective that the GPU was still in: what this rank has of it is worth nothing.
        """
        self._dropped.detach()
        lost = self._end_of_streams(together) if self.groups.on_streams else None
        together = together and lost is None
        self.liveness.close()
        if together:
            for lane_thread in self._lane_threads:
                lane_thread.close(_CLOSING_S)
            self.groups.close()
            self._under_way.clear()
            self._end()
        return lost

    def _raise_if_doomed(self) -> None:
        if self.session.doomed is not None:
            raise self.session.doomed

    def _end_of_streams(self, together: bool) -> GradSyncError | None:
        """Wait until no rank's GPU is in a collective any more: only then may a communicator go."""
        try:
            self._raise_if_doomed()
            if self.session.failed is None:
                for pending in list(self._under_way):
                    if not pending.on_host and not pending.landed(pending.patience_s):
                        self._wait.until(pending, self.timeout)
                if together:
                    self.exchange(b".", "the end of the last collective")
        except GradSyncError as error:
            return error
        return None

    def give_up(self, error: BaseException) -> None:
        """This rank left something in its middle: the lane is of no more use, to anybody."""
        self.session.give_up(error)
        for team in self._within_hosts:
            team.abandon()

    def name_lost(self, what: str, error: RuntimeError) -> None:
        """Others' collective failed: raise `PeerLost` if a rank is gone, else return, after two seconds at most."""
        self._wait.name_lost(what, error)


def _held(method: weakref.WeakMethod[F]) -> F:
    found = method()
    assert found is not None, "it works on behalf of its lane"
    return found
