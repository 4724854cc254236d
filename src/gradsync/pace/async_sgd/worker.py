"""`async_sgd` as the training loop sees it: push after a backward, pull before a forward.

    forward ─ backward ─ push ─ (step: nothing) ─ pull ─ forward ─ …      each rank at its own speed
                          │                        ▲
               gradients  ▼    every owner's shard │ parameters
                         rank 0 ▒▒  rank 1 ▒▒  rank 2 ▒▒

Every rank is a worker and owns a shard. A clock counts a worker's pushes; a read waits at the owners until the
worker is at most `max_staleness` ahead of the slowest. An owner hears of every clock, since each push goes to every
owner, be it empty.

Phases of a life: made by all at once, then push and pull in turn on each rank, `drain` by all whenever all must
hold the same, `leave` by who has no more data, `close` by all.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from gradsync.errors import GradSyncError
from gradsync.pace.async_sgd.mail import Failure, Handler, Mail
from gradsync.pace.async_sgd.messages import Inbox, MessageKind, OwnerAnswer, ShardMessage, pack, unpack
from gradsync.pace.async_sgd.owner import Owner
from gradsync.pace.async_sgd.peer_wait import PeerWait
from gradsync.pace.async_sgd.shard import Named, Shard, partition
from gradsync.plan.paces import AsyncSGD
from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.lane import Lane

_PERIOD_S = 1.0  # of keep-alives; far below any group's timeout


class AsyncWorker:
    """The worker of this rank and, beside it, its shard.

    Every rank makes it at once, with equal parameters and optimizer state; `channel` is gloo's and used by nobody
    else. `timeout` bounds every wait, and the channel's own must be longer.
    """

    def __init__(
        self,
        lane: Lane,
        channel: GlooChannel,
        parameters: Named,
        optimizers: Sequence[Optimizer],
        settings: AsyncSGD,
        timeout: float,
    ) -> None:
        self._lane, self._parameters = lane, parameters
        self._rank, size = lane.groups.rank, lane.groups.size
        shares = partition([p.nbytes for _, p in parameters], size)
        self._shares = [[parameters[index][1] for index in share] for share in shares]
        names = [[parameters[index][0] for index in share] for share in shares]
        mine = [parameters[index] for index in shares[self._rank]]
        self._inbox = inbox = Inbox(size)
        self._mail = mail = Mail(channel, self._rank, size, min(_PERIOD_S, timeout / 8), lane.groups.sockets)
        self._owner = owner = Owner(Shard(mine, optimizers), size, settings, _answer(self._rank, inbox, mail))
        self._peer_wait = PeerWait(lane, timeout, names, lambda: mail.failure)
        self.clock = 0
        self._versions = [0] * size  # of each shard, as last read
        self._has_read = True  # since its last push; all began with the same
        self._is_level = True  # nobody has pushed since all met
        self._live = True
        self._distance = 0
        self._waited_s = 0.0
        # The threads know of the owner, the inbox and the mail, not of us: they end with us.
        self._end = weakref.finalize(self, mail.abandon)
        mail.start(_serve(owner, inbox, lane))

    def push(self) -> None:
        """Hand the gradients to their owners after a backward; they are None afterwards."""
        what = "a push of gradients"
        self._peer_wait.check(what)
        if not self._live:
            raise GradSyncError(f"{self._lane.place()} this rank pushed after it had left")
        if not self._has_read:
            raise GradSyncError(
                f"{self._lane.place()} this rank pushed twice without reading parameters in between, so its "
                "staleness has no bound: run a forward between two backward passes, or add up their losses"
            )
        self._refuse_sparse()
        self.clock += 1
        self._has_read = self._is_level = False
        payloads = [pack([p.grad for p in share]) for share in self._shares]
        for _, parameter in self._parameters:
            parameter.grad = None
        for owner, payload in enumerate(payloads):
            if owner != self._rank:
                self._send(owner, ShardMessage(MessageKind.PUSH, self.clock, self._versions[owner]), what, payload)
        self._owner.note()
        self._owner.push(self._rank, self.clock, self._versions[self._rank], payloads[self._rank])

    def pull(self) -> None:
        """Wait before a forward as `max_staleness` says, then take the newest parameters of all owners."""
        answers = self._ask(ShardMessage(MessageKind.PULL, self.clock), f"a read of parameters at clock {self.clock}")
        self._distance = max(self._distance, self.clock - min(answer.slowest for answer in answers))
        self._is_level = self._is_level or len(self._shares) == 1  # who is alone has read all that was pushed

    def drain(self, rejoin: bool = False) -> None:
        """All ranks call this: all pushes are applied, all hold the same parameters, and clocks are level.

        A worker that has left stays so, unless it asks to `rejoin`.
        """
        self._live = self._live or rejoin
        answers = self._ask(ShardMessage(MessageKind.DRAIN, self.clock, int(self._live)), "a drain")
        self.clock = answers[0].slowest
        self._is_level = True

    def leave(self) -> None:
        """This worker pushes no more, and nobody waits for it; its shard goes on serving until close."""
        if self._live:
            self._live = False
            for owner in range(len(self._shares)):
                if owner != self._rank:
                    self._send(owner, ShardMessage(MessageKind.LEAVE, self.clock), "leave()")
            self._owner.note()
            self._owner.leave(self._rank)

    def stats(self) -> dict[str, float | int | str | None]:
        """This worker's clock, distance and waits, and its shard's version and staleness."""
        return {
            "clock": self.clock,
            "clock_distance_max": self._distance,
            "waited_s": self._waited_s,
            **self._owner.stats(),
        }

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's own shard, to be saved; right after a drain only."""
        self._require_level("state_dict()")
        return self._owner.state(self.clock)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """All ranks call this, each with what the same rank saved; all go on from there."""
        self._require_level("load_state_dict()")
        self.clock = self._owner.load(state)
        self.drain()

    def restart(self, optimizers: Sequence[Optimizer]) -> None:
        """Parameters and optimizers were made equal from outside: all ranks call this, and owners go on from them."""
        self._require_level("broadcast()")
        self._owner.restart(self._shares[self._rank], optimizers)

    def close(self, together: bool = True) -> None:
        """End the threads. `together` if all ranks come to this: then it is a last drain; otherwise after an error."""
        try:
            if together and self._end.alive and len(self._shares) > 1:
                self.drain()
                self._mail.say_goodbye()
                self._peer_wait.wait(self._mail.all_gone, "the end of async_sgd", list)
        finally:
            self._end()

    def _ask(self, message: ShardMessage, what: str) -> list[OwnerAnswer]:
        """Ask all owners, wait for all answers, and take over the parameters."""
        self._inbox.empty()
        start = time.perf_counter()
        for owner in range(len(self._shares)):
            if owner != self._rank:
                self._send(owner, message, what)
        if message.kind is MessageKind.PULL:
            self._owner.pull(self._rank, message.clock)
        else:
            self._owner.drain(self._rank, message.clock, bool(message.version))
        self._peer_wait.wait(self._inbox.full, what, self._stragglers)
        self._waited_s += time.perf_counter() - start
        answers = self._inbox.answers()
        with torch.no_grad():
            for share, answer in zip(self._shares, answers, strict=True):
                for parameter, value in zip(share, unpack(answer.payload, share), strict=True):
                    assert value is not None, "an owner packs all of its masters"
                    parameter.copy_(value)
        self._versions = [answer.version for answer in answers]
        self._has_read = True
        return answers

    def _send(self, owner: int, message: ShardMessage, what: str, payload: torch.Tensor | None = None) -> None:
        try:
            self._mail.send(owner, message, payload)
        except RuntimeError as error:
            self._peer_wait.fail(what, Failure(error, ours=False))

    def _stragglers(self) -> list[int]:
        others = [rank for rank in self._owner.stragglers() if rank != self._rank]
        return others or self._inbox.missing()

    def _refuse_sparse(self) -> None:
        for name, parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise TypeError(
                    f"async_sgd sends dense gradients, but that of {name!r} is sparse; make the embedding with "
                    "sparse=False"
                )

    def _require_level(self, call: str) -> None:
        if not self._is_level:
            raise GradSyncError(
                f"{self._lane.place()} {call} needs all ranks at one clock, but this one has pushed since they met: "
                "call sync.drain() on all ranks first"
            )


# Not methods: the threads must not keep the training loop's end alive.


def _answer(rank: int, inbox: Inbox, mail: Mail) -> Callable[[int, OwnerAnswer], None]:
    """Return what an owner does to answer."""

    def answer(worker: int, reply: OwnerAnswer) -> None:
        if worker == rank:
            inbox.put(rank, reply)
            return
        with contextlib.suppress(RuntimeError):  # it is gone: whoever waits learns it from the beats
            mail.send(worker, ShardMessage(MessageKind.PARAMETERS, 0, reply.version, reply.slowest), reply.payload)

    return answer


def _serve(owner: Owner, inbox: Inbox, lane: Lane) -> Handler:
    """Return what the receiver thread does with a message."""

    def guarded(source: int, message: ShardMessage, payload: torch.Tensor | None) -> None:
        try:
            handle(source, message, payload)
        except Exception:
            lane.fail()  # this shard answers no more: nobody shall wait for it
            raise

    def handle(source: int, message: ShardMessage, payload: torch.Tensor | None) -> None:
        if message.kind is MessageKind.PARAMETERS:
            inbox.put(source, OwnerAnswer(message.version, message.slowest, _whole(payload)))
        elif message.kind is MessageKind.PUSH:
            owner.push(source, message.clock, message.version, _whole(payload))
        elif message.kind is MessageKind.PULL:
            owner.pull(source, message.clock)
        elif message.kind is MessageKind.DRAIN:
            owner.drain(source, message.clock, bool(message.version))
        elif message.kind is MessageKind.LEAVE:
            owner.leave(source)

    return guarded


def _whole(payload: torch.Tensor | None) -> torch.Tensor:
    """A shard without parameters has nothing to send."""
    return torch.empty(0, dtype=torch.uint8, device="cpu") if payload is None else payload
