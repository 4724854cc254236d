"""What goes wrong on ranks, keyed by (rank, step): each function is what the ranks of one test run."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from async_runs import TIMEOUT, attached, await_event, begin, make_model, make_optimizers, steps, tell, values

from gradsync.errors import GradSyncError, PeerFault
from gradsync.pace.async_sgd.mail import Mail
from gradsync.pace.async_sgd.messages import MessageKind, ShardMessage
from gradsync.plan.guard import Guard
from gradsync.plan.paces import AsyncSGD
from gradsync.transport.groups import MESSAGES
from gradsync.transport.heartbeat import RankState
from gradsync.transport.lane import open_lane


def said(error: GradSyncError) -> tuple[str, list[int], str]:
    return type(error).__name__, list(error.ranks) if isinstance(error, PeerFault) else [], str(error)


def lose(victim: int, at: int, settings: AsyncSGD) -> tuple[str, list[int], str, RankState] | None:
    """The victim kills itself before this step; the others' error, and what they then say of themselves."""
    model = make_model()
    optimizers = make_optimizers("momentum", model)

    def before(step: int) -> None:
        if (dist.get_rank(), step) == (victim, at):
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with attached(model, optimizers, settings) as run:
            steps(run, model, optimizers, range(1000), before=before)
    except GradSyncError as error:
        return *said(error), run._lane.session.said
    return None


def leave_beside_a_dead_rank(victim: int) -> tuple[str, list[int], str] | None:
    """The victim kills itself; the others leave, which nobody answers, once they can send it nothing more."""
    model = make_model()
    optimizers = make_optimizers("sgd", model)
    try:
        with attached(model, optimizers, AsyncSGD(None)) as run:
            dist.barrier()
            if dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            with contextlib.suppress(RuntimeError):
                while True:
                    run._mail.send(victim, ShardMessage(MessageKind.ALIVE))
                    time.sleep(0.001)
            run.leave()
    except GradSyncError as error:
        return said(error)
    return None


def stay_away(settings: AsyncSGD) -> tuple[str, list[int], str] | None:
    """Rank 1 lives but does not come until rank 0 has lost patience."""
    model = make_model()
    optimizers = make_optimizers("sgd", model)
    try:
        with attached(model, optimizers, settings, timeout=1.0 if dist.get_rank() == 0 else TIMEOUT) as run:
            if dist.get_rank() == 1:
                await_event("gave-up")
            steps(run, model, optimizers, range(5))
    except GradSyncError as error:
        tell("gave-up")
        return said(error)
    return None


class Stubborn(torch.optim.SGD):
    """Steps for its own rank only."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("not for others")
        super().step()


def fail_to_step() -> tuple[str, list[int], str] | None:
    """Rank 1's optimizer raises on its receiver thread."""
    model = make_model()
    kind = Stubborn if dist.get_rank() == 1 else torch.optim.SGD
    optimizers = [kind(model.parameters(), lr=0.1)]
    try:
        with attached(model, optimizers, AsyncSGD(None)) as run:
            if dist.get_rank() == 1:
                while run._mail.failure is None:
                    time.sleep(0.001)
            steps(run, model, optimizers, range(1000))
    except GradSyncError as error:
        if dist.get_rank() == 1:
            await_event("seen")  # its process lives, but its shard answers no more
        else:
            tell("seen")
        return said(error)
    return None


def meet_nan(settings: AsyncSGD) -> list[torch.Tensor]:
    """Rank 1 has a NaN in step 1."""
    model = make_model()
    optimizers = make_optimizers("sgd", model)

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if run.stats()["clock"] == 1 and dist.get_rank() == 1 else gradient

    model[2].bias.register_hook(poison)
    with attached(model, optimizers, settings) as run:
        steps(run, model, optimizers, range(3))
        run.drain()
        return values(model)


def use_parameters_on_some_ranks() -> list[torch.Tensor]:
    """One parameter is used by nobody, one by rank 0 only; there are more ranks than parameters."""
    used, partly, unused = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    model = torch.nn.ParameterDict({"used": used, "partly": partly, "unused": unused})
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.25)]
    with attached(model, optimizers, AsyncSGD(0)) as run:
        (used + partly if dist.get_rank() == 0 else used * 1.0).backward()
        run.push()
        assert [p.grad for p in (used, partly, unused)] == [None, None, None]
        run.drain()
        return [p.detach().clone() for p in (used, partly, unused)]


def misuse() -> list[str]:
    """What the calls say that come at a wrong time."""
    model = make_model()
    optimizers = make_optimizers("sgd", model)
    texts = []
    with attached(model, optimizers, AsyncSGD(1)) as run:
        steps(run, model, optimizers, range(1))
        for call in (run.push, run.state, lambda: run.load({})):
            try:
                call()
            except GradSyncError as error:
                texts.append(str(error))
        run.drain()
        run.leave()
        try:
            run.push()
        except GradSyncError as error:
            texts.append(str(error))
    return texts


def give_up() -> set[str]:
    """Closed after an error, while somebody still holds it. The threads that are left."""
    before = set(threading.enumerate())
    model = make_model()
    optimizers = make_optimizers("sgd", model)
    lane, run = begin(model, optimizers, AsyncSGD(None))
    steps(run, model, optimizers, range(2))
    run.drain()
    dist.barrier()
    run.close(together=False)
    left = {thread.name for thread in set(threading.enumerate()) - before if "async" in thread.name}
    dist.barrier()
    lane.close(together=True)
    return left


def forget() -> set[str]:
    """Nobody closes it, and a hook on the optimizer knows it, as the engine's do. The threads that are left."""
    before = set(threading.enumerate())
    model = make_model()
    optimizers = make_optimizers("sgd", model)
    lane, run = begin(model, optimizers, AsyncSGD(None))
    optimizers[0].register_step_pre_hook(lambda *_, run=run: None)
    steps(run, model, optimizers, range(2))
    run.drain()
    dist.barrier()
    del run, optimizers
    gc.collect()
    dist.barrier()
    lane.close(together=True)
    return {thread.name for thread in set(threading.enumerate()) - before}


def keep_silent() -> int:
    """Nobody has anything to say for longer than the group's own timeout; then a message comes through."""
    timeout_s, period_s = 0.5, 0.02
    lane = open_lane(dist.group.WORLD, Guard(), TIMEOUT)
    lane.groups.add_data(dist.group.WORLD, {MESSAGES: torch.device("cpu")})
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    mail = Mail(lane.groups.data[MESSAGES], rank, 2, period_s, lane.groups.sockets)
    got: list[int] = []
    mail.start(lambda source, message, payload: got.append(message.clock))
    while mail._heard[other] * period_s < 2 * timeout_s and mail.failure is None:
        time.sleep(period_s)
    assert len(mail._sent[other]) <= 2, "what was heard is let go"
    mail.send(other, ShardMessage(MessageKind.PULL, clock=7))
    mail.say_goodbye()
    assert mail.all_gone(TIMEOUT)
    lane.close(together=True)
    assert mail.failure is None, mail.failure
    return sum(got)
