"""The meeting of the ranks, which are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from gradsync.errors import LaunchError
from gradsync.launch import rendezvous as rendezvous_module
from gradsync.launch.environment import Task
from gradsync.launch.rendezvous import Rendezvous


def meeting(
    ranks: list[int], world_size: int, port: int, act: Callable[[Rendezvous, int], Any], timeout: float = 20
) -> list[Any]:
    """What `act` returned or raised on each rank. All stay until the last is done, as rank 0 has the store."""
    outcomes: dict[int, Any] = {}
    present = []

    def run(rank: int) -> None:
        task = Task("torchrun", rank, world_size, None, "127.0.0.1", port, "test")
        try:
            rendezvous = Rendezvous(task, timedelta(seconds=timeout))
            present.append(rendezvous)
            outcomes[rank] = act(rendezvous, rank)
        except LaunchError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [outcomes[rank] for rank in ranks]


def test_exchange_gives_every_rank_every_record(port: int) -> None:
    records = meeting([0, 1, 2], 3, port, lambda rendezvous, rank: rendezvous.exchange("x", {"me": rank}))
    assert records == [[{"me": 0}, {"me": 1}, {"me": 2}]] * 3


@pytest.mark.parametrize("block", [2, 3])
def test_blocks_of_ranks_exchange_as_one_does(block: int, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "BLOCK", block)

    def act(rendezvous: Rendezvous, rank: int) -> Any:
        answers = rendezvous.exchange("same", {"host": "a"}), rendezvous.exchange("own", {"me": rank, "host": "a"})
        rendezvous.finish("own")
        return answers

    records = meeting(list(range(7)), 7, port, act)
    assert records == [([{"host": "a"}] * 7, [{"me": rank, "host": "a"} for rank in range(7)])] * 7


@pytest.mark.parametrize("missing", [1, 2, 4, 5])
def test_a_missing_rank_is_named_in_every_block(missing: int, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "BLOCK", 2)
    ranks = [rank for rank in range(6) if rank != missing]
    for rank, error in zip(ranks, meeting(ranks, 6, port, lambda rendezvous, rank: None, timeout=1), strict=True):
        assert isinstance(error, LaunchError)
        assert str(error).startswith(f"[rank {rank}/6] torchrun announced 6 tasks, but rank {missing} did not come to")


@pytest.mark.parametrize("late", [0, 3, 4])
def test_a_rank_that_meets_and_goes_no_further_is_named_in_every_block(
    late: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_module, "BLOCK", 2)

    def act(rendezvous: Rendezvous, rank: int) -> Any:
        return None if rank == late else rendezvous.exchange("x", {"me": rank})

    for rank, error in enumerate(meeting(list(range(6)), 6, port, act, timeout=1)):
        assert rank == late or f"but rank {late} did not come" in str(error)


def test_missing_ranks_are_named_on_every_rank(port: int) -> None:
    errors = meeting([0, 2], 4, port, lambda rendezvous, rank: None, timeout=1)
    for rank, error in zip([0, 2], errors, strict=True):
        assert isinstance(error, LaunchError)
        assert str(error).startswith(f"[rank {rank}/4] torchrun announced 4 tasks, but ranks 1 and 3 did not come to")


def test_keys_of_an_earlier_life_are_not_read(port: int) -> None:
    """Torchrun's agent keeps its store over restarts, with all that dead ranks wrote."""
    limit = timedelta(seconds=20)
    keeper = TCPStore("127.0.0.1", port, is_master=True, timeout=limit, wait_for_workers=False)

    def live(rank: int, life: int, timeout: timedelta = limit) -> list[Any]:
        task = Task("torchrun", rank, 2, None, "127.0.0.1", port, "test", agent_store=True)
        return Rendezvous(task, timeout).exchange("x", {"life": life})

    with pytest.raises(LaunchError, match="rank 1 did not come"):
        live(0, 0, timedelta(seconds=0.1))
    for life in (1, 2):
        answer = f"gradsync/test/{keeper.get('gradsync/test/challenge').decode()}/meet/0/1"
        keeper.delete_key(answer)
        with ThreadPoolExecutor(1) as other:
            early = other.submit(live, 1, life)
            keeper.wait([answer])  # rank 1 is there, and found the challenge of a dead rank 0
            assert live(0, life) == [{"life": life}] * 2
            assert early.result(timeout=30) == [{"life": life}] * 2
