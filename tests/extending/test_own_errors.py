"""An error in the code of one's own compressor or algorithm says whose it is; the other ranks hear who failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_other import EveryOther
from star import Star

import gradsync as gs
from gradsync.algorithms.schedule import Schedule
from gradsync.compress.rounds import CodedBucket, Compute, Sum

Run = Callable[..., Any]
BROKEN = 1  # the rank whose code raises


class OopsError(RuntimeError):
    """Of the user's."""


class OddError(ValueError):
    """Likewise, and no RuntimeError."""


ERRORS: dict[str, type[Exception]] = {"RuntimeError": OopsError, "ValueError": OddError}


@dataclass(frozen=True)
class Breaking(EveryOther):
    where: str = "encode"
    kind: str = "RuntimeError"

    def rounds(self, bucket: CodedBucket) -> Iterator[Compute | Sum]:
        self._come_to("rounds")
        encode, payload, decode = super().rounds(bucket)
        last = any(param.name in ("0.weight", "the tensor") for param in bucket.params)
        for stage, where in ((encode, "encode"), (payload, ""), (decode, "decode")):
            if where == self.where and last and isinstance(stage, Compute):
                yield stage._replace(run=lambda step: self._come_to(self.where) if step == 3 else None)
            else:
                yield stage

    def _come_to(self, where: str) -> None:
        if where == self.where and dist.get_rank() == BROKEN:
            raise ERRORS[self.kind]("oops\nin two lines")


@dataclass(frozen=True)
class Choosy(EveryOther):
    def choose(self, param: Any) -> Any:
        if dist.get_rank() == BROKEN:
            raise OopsError("oops")
        return super().choose(param)


@dataclass(frozen=True)
class BreakingStar(Star):
    kind: str = "RuntimeError"

    def schedule(self, hosts: Any) -> Schedule:
        if dist.get_rank() == BROKEN:
            raise ERRORS[self.kind]("oops")
        return super().schedule(hosts)


def train(plan: gs.Plan) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = gs.attach(model, optimizer, plan, guard=gs.Guard(timeout=40))
    for _ in range(6):
        model(torch.ones(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()


def reduce(plan: gs.Plan) -> None:
    for _ in range(5):
        gs.all_reduce(torch.arange(4.0), algorithm=plan.algorithm, compress=plan.compress)


def raised(work: Callable[[gs.Plan], None], plan: gs.Plan) -> tuple[str, str, str]:
    try:
        work(plan)
    except Exception as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
    return "", "", ""


def check_the_other_hears(other: tuple[str, str, str]) -> None:
    name, text, _ = other
    assert name == "PeerLost"
    assert f"] rank {BROKEN} (pid " in text
    assert ") failed in step " in text


PLACES = [("rounds", 0, 0, "2.bias, 2.weight"), ("encode", 3, 1, "0.bias, 0.weight")]
PLACES += [("decode", 3, 1, "0.bias, 0.weight")]


@pytest.mark.parametrize(("where", "step", "bucket", "names"), PLACES)
@pytest.mark.parametrize("kind", ERRORS)
def test_a_compressor_that_raises_is_named_with_its_bucket(
    where: str, step: int, bucket: int, names: str, kind: str, run: Run
) -> None:
    plan = gs.Plan(compress=gs.error_feedback(Breaking(where, kind)), bucket_bytes=1024)
    other, broken = run(raised, train, plan)
    own = ERRORS[kind].__name__
    assert broken == (
        "GradSyncError",
        f"[rank 1/2 step {step} bucket {bucket}] the compressor Breaking raised {own} in bucket {bucket} ({names}): "
        "oops; correct its code, or leave it out of the plan",
        own,
    )
    check_the_other_hears(other)


@pytest.mark.parametrize("pace", [gs.local_sgd(2), gs.diloco(2), gs.delayed(1)], ids=["local_sgd", "diloco", "delayed"])
def test_under_every_pace_that_compresses(pace: Any, run: Run) -> None:
    other, broken = run(raised, train, gs.Plan(compress=Breaking("rounds"), pace=pace))
    assert broken[0] == "GradSyncError"
    assert "the compressor Breaking raised OopsError in bucket 0 (" in broken[1]
    check_the_other_hears(other)


@pytest.mark.parametrize("kind", ERRORS)
def test_a_single_tensors_compressor_is_named_too(kind: str, run: Run) -> None:
    other, broken = run(raised, reduce, gs.Plan(compress=Breaking("encode", kind)))
    own = ERRORS[kind].__name__
    assert broken[::2] == ("GradSyncError", own)
    assert f"the compressor Breaking raised {own} in bucket 0 (the tensor): oops; " in broken[1]
    check_the_other_hears(other)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("work", [train, reduce])
def test_an_algorithm_that_raises_is_named(work: Any, kind: str, run: Run) -> None:
    other, broken = run(raised, work, gs.Plan(algorithm=BreakingStar(kind)))
    own = ERRORS[kind].__name__
    assert broken == (
        "GradSyncError",
        f"the algorithm BreakingStar raised {own} in BreakingStar.schedule(((0, 1),)): oops; correct its code, or name "
        "another algorithm in the plan",
        own,
    )
    check_the_other_hears(other)


def test_who_fails_while_it_attaches_has_not_left_in_good_order(run: Run) -> None:
    other, broken = run(raised, train, gs.Plan(compress=Choosy()))
    assert broken[:2] == ("OopsError", "oops")
    check_the_other_hears(other)
