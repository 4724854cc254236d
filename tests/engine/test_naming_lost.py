"""A rank that is lost while others' collectives run is named by `sync.naming_lost()`."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.launch.spawn import RankPool
from gradsync.transport.heartbeat import Phase


def wait_for_a_dead_rank() -> str:
    sync = gs.attach(torch.nn.Linear(2, 2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with sync.naming_lost("our own barrier"):
            dist.barrier()
    except gs.PeerLost as error:
        assert isinstance(error.__cause__, RuntimeError)  # noqa: PT017
        return f"{error.ranks} {error}"
    return "nobody was missed"


def fail_alone() -> None:
    sync = gs.attach(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="its own") as caught, sync.naming_lost():
        raise RuntimeError("a fault of its own")
    assert not isinstance(caught.value, gs.GradSyncError)
    sync.detach()


def test_an_error_of_others_that_comes_of_a_dead_rank_names_it(pool: RankPool) -> None:
    survivor, _ = pool.outcomes(wait_for_a_dead_rank, ranks=2)
    assert survivor.ok, survivor.text
    assert survivor.value.startswith("(1,) [rank 0/2 step 0]")
    assert "while this rank was in our own barrier" in survivor.value


def test_an_error_while_all_are_alive_stays_what_it_is(pool: RankPool) -> None:
    pool.run(fail_alone, ranks=2)


def say_where_it_is() -> list[str]:
    """What this rank says of itself when the averages of each step are there."""
    model = torch.nn.Linear(2, 2)
    sync, said = gs.attach(model), list[str]()
    session = sync._steps.synchronization.lane.session
    sync._steps.tell(averaged=lambda headers: said.append(str(session.said.phase)))
    for _ in range(2):
        model(torch.randn(3, 2)).sum().backward()
    sync.detach()
    return said


def test_after_backward_a_rank_is_synchronizing_in_the_first_step_too(pool: RankPool) -> None:
    assert pool.run(say_where_it_is, ranks=2) == [[str(Phase.SYNCHRONIZING)] * 2] * 2
