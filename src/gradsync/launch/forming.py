"""The ranks have met: now torch makes their group, in a thread, while this one looks after the others.

    thread   ├─ the others' pages ─┼─ init_process_group ─┼─ everybody's word that it has the group ─┤
    caller   ├─ slice ─┼─ slice ─┼─ …                  ends at once when a process of this host ends

Either all ranks have the group then, or all raise.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradsync.errors import LaunchError, PeerFault, PeerLost, listed, place
from gradsync.launch.environment import Task
from gradsync.launch.rendezvous import Rendezvous
from gradsync.plan.guard import Guard
from gradsync.transport.connecting import Attempt
from gradsync.transport.groups import Groups
from gradsync.transport.host_processes import remember
from gradsync.transport.lane import Lane
from gradsync.transport.liveness import Liveness
from gradsync.transport.store_tree import StoreTree


def form_group(backend: str, rendezvous: Rendezvous, task: Task, limit: timedelta) -> None:
    """The default group, on every rank at once; raises LaunchError and leaves none if a rank is lost."""
    rank, size = task.rank, task.world_size

    def make(attempt: Attempt[None]) -> None:
        attempt.end_by(rendezvous.close)
        with attempt.constructing(size):
            dist.init_process_group(backend, store=rendezvous.store, rank=rank, world_size=size, timeout=limit)
        try:
            _hear_all(rendezvous.store, task, attempt)
        except BaseException:
            dist.destroy_process_group()
            raise

    groups = Groups(rank, size, tuple(range(size)), store=rendezvous.store)
    guard, seconds = Guard(), limit.total_seconds()
    lane = Lane(groups, Liveness(groups, guard), guard, seconds, more_time="gs.init(timeout=seconds)")
    try:
        lane.meet()
        lane.connect(make, f"the making of the {backend} group")
    except RuntimeError as error:
        lane.close(together=False)
        raise _explained(error, backend, task) from error
    except BaseException:
        lane.close(together=False)
        raise
    for other in range(size):
        if (pid := lane.liveness.pid(other)) is not None:
            remember(other, pid)
    lane.close(together=True)


def _hear_all(store: Store, task: Task, attempt: Attempt[None]) -> None:
    """Return when every rank has the group."""
    pause = attempt.pauses()
    for _ in StoreTree(store, task.rank, task.world_size).merge("formed", b"", b"".join, from_level=0):
        pause()


def _explained(error: RuntimeError, backend: str, task: Task) -> LaunchError:
    why = f"({str(error).strip().splitlines()[0]}): see whether a rank ended"
    if isinstance(error, PeerFault) and error.ranks:
        state = "died or fell silent" if isinstance(error, PeerLost) else "came no further"
        why = f"because {listed(error.ranks)} {state}: see its own output"
    return LaunchError(
        f"{place(task.rank, task.world_size)} the ranks met, but their {backend} group did not form {why}, and whether "
        "a firewall closes the ports above 1024 between the hosts"
    )
