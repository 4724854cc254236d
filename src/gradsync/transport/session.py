"""A session: this rank among the others of one group, at which step it is, and whether it can go on.

One stands behind each attach, DDP hook, observer, group of the torch backend and single all-reduce, and has the only
count of steps. The peers read on this rank's page what it says here.

    next_step        ├─ step 0 ──────┼─ step 1 ──────┼─ step 2 ─ …
    at                 backward, synchronizing, waiting
    give_up                                    ✕ an error: said to the others, and nothing more is sent
    goodbye                                                      └ all ranks are here: connections may close
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from gradsync.errors import BackwardAborted, Disagreement, GradSyncError, NonFinite, PeerFault, listed, place
from gradsync.transport.blame import PeerViews, describe_peer, is_lost
from gradsync.transport.groups import Groups
from gradsync.transport.heartbeat import Phase, RankState
from gradsync.transport.liveness import Liveness


@contextmanager
def giving_up(give_up: Callable[[BaseException], object]) -> Iterator[None]:
    """Tell `give_up` first of whatever is raised inside."""
    try:
        yield
    except BaseException as error:
        give_up(error)
        raise


class Position:
    """The rank and the step it is at: the prefix of every message."""

    def __init__(self, rank: int, size: int) -> None:
        self.step = 0
        self._rank = rank
        self._size = size

    def next_step(self) -> None:
        """This step is over."""
        self.step += 1

    def continue_at(self, step: int) -> None:
        """Go on where another session was: one that was saved, or had another plan."""
        self.step = step

    def place(self, bucket: int = -1) -> str:
        return place(self._rank, self._size, self.step, bucket if bucket >= 0 else None)


class LeaveResult(NamedTuple):
    """The way in which the ranks parted."""

    together: bool  # nothing is under way, on any rank
    objection: Disagreement | None  # others were in another call


class Session(Position):
    """The state of one attachment that peers and messages speak of."""

    def __init__(self, groups: Groups, liveness: Liveness) -> None:
        super().__init__(groups.ranks[groups.rank], groups.size)
        self.groups = groups
        self.liveness = liveness
        self._heartbeat = liveness.heartbeat
        self.failed: str | None = None  # the kind of error by which this rank gave up
        self.stuck_bucket: int | None = None  # what was under way then
        self.doomed: GradSyncError | None = None  # what another thread found, for the one that trains to raise
        self.describe: Callable[[int], str] = lambda bucket: f"bucket {bucket}"
        self.noticed: Callable[[str, list[int]], None] = _ignore

    def name_buckets(self, describe: Callable[[int], str]) -> None:
        """Errors and warnings call buckets by these names from now on."""
        self.describe = describe

    def notice(self, noticed: Callable[[str, list[int]], None]) -> None:
        """Have `noticed` hear of every long wait, and for whom."""
        self.noticed = noticed

    def got_stuck(self, bucket: int) -> None:
        """Note that this rank gives up while it waits for that bucket, if for any."""
        self.stuck_bucket = bucket if bucket >= 0 else None

    def doom(self, error: GradSyncError) -> None:
        """Another thread has given up: the next wait raises this."""
        self.doomed = error

    # What this rank says of itself

    @property
    def said(self) -> RankState:
        """The state this rank last said it is in."""
        return self._heartbeat.state

    def at(self, phase: Phase, bucket: int = -1) -> None:
        """Say where this rank is."""
        self._heartbeat.at(self.step, phase, bucket)

    def next_step(self) -> None:
        """This step is over: this rank computes again."""
        self.step += 1
        self._heartbeat.at(self.step, Phase.COMPUTING)

    def resume(self, said: RankState) -> None:
        """Say again what was said before a wait."""
        self._heartbeat.at(self.step, said.phase, said.bucket, said.culprits)

    def fail(self, culprits: tuple[int, ...] = (), lost: bool = False) -> None:
        """Say that this rank has given up, and because of whom; `lost`: they will never come."""
        self.liveness.at(self.step, Phase.LOST_PEER if lost else Phase.FAILED, culprits=culprits)

    # Who the others are

    def global_ranks(self, ranks: list[int]) -> list[int]:
        return [self.groups.ranks[rank] for rank in ranks]

    def describe_peers(self, views: PeerViews, ranks: list[int]) -> str:
        """Say what became of these ranks."""
        names = [(rank, listed(self.global_ranks([rank]))) for rank in ranks]
        return "; ".join(
            describe_peer(views[rank], name, self.liveness.pid(rank), is_lost(views, rank))
            if rank in views
            else f"{name} {'was lost' if is_lost(views, rank) else 'is late'}, as another rank says"
            for rank, name in names
        )

    def describe_culprits(self, views: PeerViews, ranks: list[int]) -> str:
        """Say what became of these, though we may have no view of any: views are those of the most notable ranks."""
        hearsay = f"{listed(self.global_ranks(ranks))} came no further, as other ranks say" if ranks else ""
        return self.describe_peers(views, ranks) or hearsay

    # The end

    def give_up(self, error: BaseException) -> bool:
        """Send nothing more: ranks no longer know where the others are. False if that is no news, or ends a step only.

        Whoever waited has said already who is to blame.
        """
        if self.failed is not None or isinstance(error, BackwardAborted | NonFinite):
            return False
        self.failed = type(error).__name__
        if not isinstance(error, PeerFault):
            self.fail()
        self.groups.abort()
        return True

    def failing(self) -> AbstractContextManager[None]:
        """Give up if what the other ranks take part in raises."""
        return giving_up(self.give_up)

    def next_call(self, what: str, before: str) -> None:
        """A collective of the user's own is a step; raises if an earlier `before` gave up."""
        if self.failed is not None:
            raise GradSyncError(
                f"{self.place()} {what} cannot go on after an earlier {before} gave up ({self.failed}); "
                "exit with an error, or destroy the process group and make a new one on every rank"
            )
        self.step += 1

    def goodbye(self, meet: Callable[[], object]) -> LeaveResult:
        """Wait in `meet` until every rank is here, so that nobody closes a connection another still reads.

        Who is gone is not missed; but ranks that go on without this one are a mistake that all hear of.
        """
        if self.failed is not None:
            return LeaveResult(False, None)
        try:
            meet()
        except (BackwardAborted, NonFinite):
            pass  # of a step alone, and on all ranks
        except Disagreement as error:
            return LeaveResult(False, error)
        except GradSyncError:
            return LeaveResult(False, None)
        return LeaveResult(True, None)


def _ignore(_: str, __: list[int]) -> None: ...
