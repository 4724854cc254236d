"""The ranks find each other in a store and exchange small JSON records, before any group exists.

Gloo connects every pair while its group is made, and hangs there when a rank is missing or an address
is wrong. So who is there, and under which address, is settled first, in the store alone.

Note [Fresh keys]
-----------------
A store may hold keys of ranks that are dead: torchrun keeps one over restarts, and a program may leave
a group and make another. So rank 0 draws a challenge and everything happens under it:

    rank 0:   set challenge = c0       wait for every rank's nonce in c0      set c0/meet/all, a digest of them
    rank k:   see challenge c  →  set its nonce in c  →  c/meet/all is a digest of my block's nonces?  done
                    ↑_____________ no: c is of an earlier life, look again _________|

The group is then made under c0 as well, so gloo finds no dead rank's address either.

Ranks hear each other as in `store_tree`: a rank asks for its block's records and for one value, whatever their number.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
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
from gradsync.transport.store_tree import BLOCK, Awaited, KeyStore, StoreTree, result_key

T = TypeVar("T")
Record = dict[str, Any]

# How long rank 0, which may hold the store, stays for the others to read why it gives up.
_FINISH_S = 2.0
# How much longer the others wait than rank 0, so that its answer reaches them before their own deadline.
_GRACE_S = 1.0
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1
_POLLS_PER_S = 10_000  # of all ranks together
_LOOK_S = 1.0  # between two looks for word of other blocks
_ENDED = "ended"


class Rendezvous:
    """The ranks of one launch, and the store they meet in."""

    def __init__(self, task: Task, timeout: timedelta) -> None:
        """Connect, and wait until every rank is there; `store` is then free of any earlier life."""
        self._task = task
        self._timeout = timeout
        self._clock = AwakeClock(timeout.total_seconds())
        self._sockets: frozenset[tuple[int, str]] = frozenset()
        self._pids: dict[int, int] = {}  # of the ranks of this host in our block; known when all have met
        self._ended_elsewhere: list[int] = []  # as ranks of other blocks say
        self.store = self._bounded(self._join)

    def exchange(self, tag: str, record: Record) -> list[Record]:
        """Every rank's record, in the order of ranks; equal ones of neighbours travel once."""
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
        nonce = secrets.token_hex(8)
        mine = [nonce, kernel_identity(), os.getpid()]
        if self._task.rank == 0:
            store.set("challenge", nonce)
            fresh = PrefixStore(nonce, store)
            if not self._go_through(self._meeting(root := self._tree(fresh), mine), root):
                raise self._give_up(root, "meet")
            return fresh
        challenge, pauses = b"", self._pauses()
        tree: StoreTree | None = None
        meeting: Iterator[Any] = iter(())
        while self._clock.left() + _GRACE_S > 0:
            if store.check(["challenge"]) and (current := store.get("challenge")) != challenge:
                challenge, fresh = current, PrefixStore(current.decode(), store)
                tree = self._tree(fresh)
                meeting = self._meeting(tree, mine)
            try:
                next(meeting)
            except StopIteration as end:
                if end.value:
                    return fresh
            time.sleep(next(pauses))
        raise self._absent(self._missing(tree, "meet") if tree is not None else [0])

    def _meeting(self, tree: StoreTree, mine: list[Any]) -> Generator[Any, None, bool]:
        """Return whether rank 0 has heard of this very rank; raise if it says who did not come."""
        record = json.dumps(mine).encode()
        found = {tree.rank: record}
        steps = self._nonces(tree, record, found)
        answer = json.loads((yield from self._led(steps, tree, "meet")))
        if isinstance(answer, dict):
            if answer["records"][tree.rank] == mine:
                raise self._refused(tree, "meet", answer["absent"])
            return False
        found = yield from tree.values_of("meet", list(tree.block.members))
        if answer[tree.block_number] != _digest(found):
            return False
        records = {rank: json.loads(said) for rank, said in found.items()}
        # Whose end can be seen here: their numbers mean the same processes.
        self._pids = {rank: pid for rank, (_, kernel, pid) in records.items() if kernel == mine[1]}
        self._seen(tree, "meet")
        return True

    def _nonces(self, tree: StoreTree, record: bytes, found: dict[int, bytes]) -> Generator[Awaited, None, bytes]:
        """A digest for each block, as rank 0 publishes them."""
        if tree.block.leader == tree.rank:
            yield from tree.take("meet", tree.block, record, found.update)
        else:
            tree.tell("meet", tree.block, record)
        return (yield from tree.merge("meet", json.dumps([_digest(found)]).encode(), _chained))

    def _exchange(self, tag: str, record: Record) -> list[Record]:
        tree = self._tree(self.store)
        mine = json.dumps([[1, record]]).encode()
        steps = self._led(tree.merge(tag, mine, _joined_runs, from_level=0), tree, tag)
        text = self._go_through(steps, tree)
        if text is None:
            raise self._give_up(tree, tag) if tree.rank == 0 else self._absent(self._missing(tree, tag))
        answer = json.loads(text)
        if isinstance(answer, dict):
            raise self._refused(tree, tag, answer["absent"])
        self._seen(tree, tag)
        records = [dict(each) for count, each in answer for _ in range(count)]
        assert len(records) == tree.size, f"{len(records)} records of {tree.size} ranks"
        return records

    def _led(
        self, steps: Generator[Awaited, None, bytes], tree: StoreTree, tag: str
    ) -> Generator[Awaited, None, bytes]:
        """The steps, or what rank 0 says meanwhile: it may give up while a block's first rank waits for its block."""
        while True:
            try:
                awaited = next(steps)
            except StopIteration as end:
                return bytes(end.value)
            if awaited.ranks and tree.rank != 0 and tree.store.check([result_key(tag)]):
                return bytes(tree.store.multi_get([result_key(tag)])[0])
            yield awaited

    def _go_through(self, steps: Generator[Any, None, T], tree: StoreTree) -> T | None:
        """Return what comes of the steps; None if the time is over, or a rank has ended."""
        more_s = 0.0 if tree.rank == 0 else _GRACE_S
        pauses, looked = self._pauses(), 0.0
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            if self._clock.left() + more_s <= 0 or self._gone():
                return None
            if not tree.one_block and self._clock.passed - looked >= _LOOK_S:
                looked = self._clock.passed
                if tree.store.check([_ENDED]):
                    self._ended_elsewhere = json.loads(tree.store.multi_get([_ENDED])[0])
            time.sleep(next(pauses))

    def _tree(self, store: Store) -> StoreTree:
        return StoreTree(store, self._task.rank, self._task.world_size, BLOCK)

    def _pauses(self) -> Iterator[float]:
        """Seconds between two looks at the store; the more ranks look, the longer."""
        pause, last = _FIRST_POLL_S, max(_LAST_POLL_S, self._task.world_size / _POLLS_PER_S)
        while True:
            yield pause
            pause = min(2 * pause, last)

    def _give_up(self, tree: StoreTree, tag: str) -> LaunchError:
        """Rank 0's part when some did not come: publish who did, and who did not."""
        absent = self._missing(tree, tag)
        records: list[Any] = [None] * tree.size
        if tag == "meet":  # by its record a rank knows whether this answer is for it
            for rank, record in _at_once(tree.values_of(tag, tree.said(tag))).items():
                records[rank] = json.loads(record)
        tree.store.set(result_key(tag), json.dumps({"records": records, "absent": absent}))
        if not (tree.one_block and self._gone()):  # there everybody sees it by itself
            self._await_seen(tree.store, tag, len(absent))
        return self._absent(absent)

    def _missing(self, tree: StoreTree, tag: str) -> list[int]:
        """Return whom the others wait for; who saw a process end leaves word of it for other blocks."""
        if (gone := self._gone()) and not tree.one_block:
            tree.store.set(_ENDED, json.dumps(gone))
        if gone:
            return gone
        late = tree.laggards(tag)
        return late.missing or late.holding or [0]

    def _gone(self) -> list[int]:
        return [rank for rank, pid in self._pids.items() if is_gone(pid)] or self._ended_elsewhere

    def _refused(self, tree: StoreTree, tag: str, absent: list[int]) -> LaunchError:
        self._seen(tree, tag)
        return self._absent(absent)

    def _seen(self, tree: StoreTree, tag: str) -> None:
        if tree.rank != 0:
            tree.store.add(f"{tag}/seen", 1)

    def _await_seen(self, store: KeyStore, tag: str, num_absent: int = 0) -> None:
        """Stay until the others have read rank 0's answer, but not for long."""
        bound, pauses = AwakeClock(_FINISH_S), self._pauses()
        while store.add(f"{tag}/seen", 0) < self._task.world_size - 1 - num_absent and not bound.over():
            time.sleep(next(pauses))

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


def _digest(records: dict[int, bytes]) -> str:
    return hashlib.sha256(b"".join(records[rank] for rank in sorted(records))).hexdigest()[:32]


def _chained(parts: list[bytes]) -> bytes:
    return json.dumps([each for part in parts for each in json.loads(part)]).encode()


def _joined_runs(parts: list[bytes]) -> bytes:
    """Records with how many ranks in a row bring them."""
    runs: list[Any] = []
    for count, record in json.loads(_chained(parts)):
        if runs and runs[-1][1] == record:
            runs[-1][0] += count
        else:
            runs.append([count, record])
    return json.dumps(runs).encode()


def _at_once(steps: Generator[Any, None, dict[int, bytes]]) -> dict[int, bytes]:
    """Return what comes of steps that need not wait; nothing if they would."""
    try:
        next(steps)
    except StopIteration as end:
        return dict(end.value)
    return {}


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
