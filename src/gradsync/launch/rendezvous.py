"""The ranks find each other in a store and exchange small JSON records, before any group exists.

Gloo connects every pair while its group is made, and hangs there when a rank is missing or an address
is wrong. So who is there, and under which address, is settled first, in the store alone.

Note [Fresh keys]
-----------------
A store may hold keys of ranks that are dead: torchrun keeps one over restarts, and a program may leave
a group and make another. So rank 0 draws a challenge and everything happens under it:

    rank 0:   set challenge = c0            wait for every c0/meet/<rank>    set c0/meet/all
    rank k:   see challenge c  →  set c/meet/<k> = its nonce  →  c/meet/all names my nonce?  done
                    ↑______________ no: c is of an earlier life, look again ______|

The group is then made under c0 as well, so gloo finds no dead rank's address either.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

# torch.distributed has these names too, but only this module declares them to type checkers.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from gradsync.errors import LaunchError, listed, place
from gradsync.launch.environment import Task
from gradsync.launch.interface import is_loopback
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.host_meeting import kernel_identity
from gradsync.transport.host_processes import is_gone
from gradsync.transport.sockets import connections, cut

T = TypeVar("T")
Record = dict[str, Any]

# How long rank 0, which may hold the store, stays for the others to read why it gives up.
_FINISH_S = 2.0
# How much longer the others wait than rank 0, so that its answer reaches them before their own deadline.
_GRACE_S = 1.0
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1


class Rendezvous:
    """The ranks of one launch, and the store they meet in."""

    def __init__(self, task: Task, timeout: timedelta) -> None:
        """Connect, and wait until every rank is there; `store` is then free of any earlier life."""
        self._task = task
        self._timeout = timeout
        self._clock = AwakeClock(timeout.total_seconds())
        self._sockets: frozenset[tuple[int, str]] = frozenset()
        self._pids: dict[int, int] = {}  # of the ranks of this host; known when all have met
        self.store = self._bounded(self._join)

    def exchange(self, tag: str, record: Record) -> list[Record]:
        """Every rank's record, in the order of ranks. Through rank 0, so n ranks read n messages each."""
        return self._bounded(lambda: self._exchange(tag, record))

    def finish(self, tag: str) -> None:
        """Let the others, before rank 0 gives up, read the records of `tag`, from which they conclude alike."""
        if self._task.rank == 0:
            self._bounded(lambda: self._await_seen(self.store, tag))

    def close(self) -> None:
        """End this rank's connections to the store: who waits in it, in C, learns that all is over."""
        cut(self._sockets)

    def _join(self) -> Store:
        while True:
            try:
                return self._meet(PrefixStore(f"gradsync/{self._task.job}", self._open()))
            except dist.DistError:
                # The store that rank 0 kept for an earlier group ended under us; its next one will come.
                if self._task.rank == 0 or self._clock.over():
                    raise

    def _open(self) -> Store:
        task = self._task
        hosting = task.rank == 0 and not task.agent_store
        if not hosting:
            self._await_listener()
        before = connections()
        store = TCPStore(
            task.address,
            task.port,
            task.world_size,
            is_master=hosting,
            timeout=self._timeout,
            wait_for_workers=False,  # _meet waits, and can say who is missing
            multi_tenant=hosting,
            master_listen_fd=_loopback_listener(task) if hosting else None,
        )
        self._sockets = connections() - before
        return store

    def _await_listener(self) -> None:
        """Wait until somebody listens. TCPStore can wait too, but for twice its timeout and with a stack dump."""
        task, pause = self._task, _FIRST_POLL_S
        while True:
            left = self._clock.left()
            try:
                socket.create_connection((task.address, task.port), timeout=max(0.1, min(5.0, left))).close()
                return
            except OSError as error:
                if left <= 0:
                    who = "torchrun's agent" if task.agent_store else "rank 0"
                    raise self._error(
                        f"{who} could not be reached at {task.address}:{task.port} within "
                        f"{self._timeout.total_seconds():g} s ({error}): see whether rank 0 started, "
                        f"whether {task.address} is its host, seen from {socket.gethostname()}, "
                        "and whether a firewall is between"
                    ) from None
            time.sleep(min(pause, max(0.0, left)))
            pause = min(2 * pause, _LAST_POLL_S)

    def _meet(self, store: Store) -> Store:
        """Meet under a challenge that rank 0 draws anew. See Note [Fresh keys]."""
        nonce, kernel = secrets.token_hex(8), kernel_identity()
        mine = [nonce, kernel, os.getpid()]
        if self._task.rank == 0:
            store.set("challenge", nonce)
            fresh = PrefixStore(nonce, store)
            self._know(self._collect(fresh, "meet", mine), kernel)
            return fresh
        challenge, pause = b"", _FIRST_POLL_S
        fresh = PrefixStore("", store)
        while self._clock.left() + _GRACE_S > 0:
            if store.check(["challenge"]) and (current := store.get("challenge")) != challenge:
                challenge, fresh = current, PrefixStore(current.decode(), store)
                fresh.set(_key("meet", self._task.rank), json.dumps(mine))
            if challenge and fresh.check(["meet/all"]) and (all_ := self._read(fresh, "meet", own=mine)) is not None:
                self._know(all_, kernel)
                return fresh
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)
        raise self._absent((challenge and self._missing(fresh, "meet")) or [0])

    def _know(self, records: list[list[Any]], kernel: str) -> None:
        """Note whose end can be seen here: their numbers mean the same processes."""
        self._pids = {rank: pid for rank, (_, theirs, pid) in enumerate(records) if theirs == kernel}

    def _gone(self) -> list[int]:
        return [rank for rank, pid in self._pids.items() if is_gone(pid)]

    def _exchange(self, tag: str, record: Record) -> list[Record]:
        if self._task.rank == 0:
            return self._collect(self.store, tag, record)
        self.store.set(_key(tag, self._task.rank), json.dumps(record))
        if not self._await_keys(self.store, [f"{tag}/all"], _GRACE_S):
            raise self._absent(self._gone() or self._missing(self.store, tag) or [0])
        records = self._read(self.store, tag)
        assert records is not None
        return records

    def _collect(self, store: Store, tag: str, record: Any) -> list[Any]:
        """Rank 0's part: gather and publish the records, or who did not come."""
        others = range(1, self._task.world_size)
        complete = self._await_keys(store, [_key(tag, rank) for rank in others])
        absent = [] if complete else self._gone() or self._missing(store, tag)
        present = [rank for rank in others if rank not in absent]
        texts = store.multi_get([_key(tag, rank) for rank in present])
        found = {0: record} | {rank: json.loads(text) for rank, text in zip(present, texts, strict=True)}
        records = [found.get(rank) for rank in range(self._task.world_size)]
        store.set(f"{tag}/all", json.dumps({"records": records, "absent": absent}))
        if absent:
            self._await_seen(store, tag, absent)
            raise self._absent(absent)
        return records

    def _missing(self, store: Store, tag: str) -> list[int]:
        return [rank for rank in range(1, self._task.world_size) if not store.check([_key(tag, rank)])]

    def _read(self, store: Store, tag: str, own: Any = None) -> list[Any] | None:
        """The others' part: rank 0's answer; None if it is of an earlier life, without our own record."""
        rank = self._task.rank
        answer = json.loads(store.get(f"{tag}/all"))
        records: list[Any] = answer["records"]
        if own is not None and records[rank] != own:
            return None
        store.set(f"{tag}/seen/{rank}", "")
        if answer["absent"]:
            raise self._absent(answer["absent"])
        return records

    def _await_seen(self, store: Store, tag: str, absent: list[int] | None = None) -> None:
        ranks = set(range(1, self._task.world_size)) - set(absent or ())
        keys = [f"{tag}/seen/{rank}" for rank in sorted(ranks)]
        self._await_keys(store, keys, _FINISH_S - self._clock.left())

    def _await_keys(self, store: Store, keys: list[str], more_s: float = 0.0) -> bool:
        """Whether the keys came within our bound, and so much more; False too when a rank of this host has ended."""
        pause = _FIRST_POLL_S
        while not store.check(keys):
            if self._clock.left() + more_s <= 0 or self._gone():
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)
        return True

    def _bounded(self, work: Callable[[], T]) -> T:
        """`work()` under an outside deadline, and open to Ctrl-C: a store call does not return while the
        process that holds the store is stopped."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="gradsync-launch", daemon=True)
        thread.start()
        bound = AwakeClock(max(0.0, self._clock.left()) + 2 * _FINISH_S)
        while thread.is_alive() and not bound.over():
            self._clock.look()  # the thread may be in a call of several seconds
            thread.join(_LAST_POLL_S)
        where = f"{self._task.address}:{self._task.port}"
        if thread.is_alive():
            raise self._error(f"the store at {where} stopped answering: see whether rank 0's process is stopped")
        if errors and isinstance(errors[0], LaunchError):
            raise errors[0]
        if errors and isinstance(errors[0], (dist.DistError, OSError)):
            raise self._error(_explained(self._task, str(errors[0]).split("\n")[0])) from errors[0]
        if errors:
            raise errors[0]
        return results[0]

    def _absent(self, ranks: list[int]) -> LaunchError:
        task = self._task
        if gone := [rank for rank in ranks if rank in self._gone()]:
            return self._error(f"{listed(gone)} ended while the ranks met: see its own output for why")
        return self._error(
            f"{task.launcher} announced {task.world_size} tasks, but {listed(ranks)} did not come to "
            f"{task.address}:{task.port} within {self._timeout.total_seconds():g} s: see whether "
            "they started, whether they ended early, and whether they reach that address"
        )

    def _error(self, sentence: str) -> LaunchError:
        return LaunchError(f"{place(self._task.rank, self._task.world_size)} {sentence}")


def _key(tag: str, rank: int) -> str:
    return f"{tag}/{rank}"


def _loopback_listener(task: Task) -> int | None:
    """A socket that only this host reaches, where only this host is meant; TCPStore's own is open to all."""
    if task.address != "localhost" and not _is_ipv4_loopback(task.address):
        return None
    host = "127.0.0.1" if task.address == "localhost" else task.address
    # TCPStore owns the descriptor from here on.
    return socket.create_server((host, task.port), backlog=1024).detach()


def _is_ipv4_loopback(address: str) -> bool:
    try:
        return is_loopback(address) and ":" not in address
    except ValueError:
        return False


def _explained(task: Task, reason: str) -> str:
    where = f"{task.address}:{task.port}"
    if "in use" in reason:
        return f"port {task.port} of this host is taken: set MASTER_PORT to a free one ({reason})"
    return f"the store at {where} was lost: see whether rank 0 ended early ({reason})"
