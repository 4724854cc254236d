"""The paces as data: how often and how fresh, for `Plan(pace=...)`. What each does is in `pace/`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gradsync.plan.pace_recipe import (
    BetweenSteps,
    DuringBackward,
    DuringNextStep,
    DuringWindow,
    Exchange,
    Pace,
    PaceRecipe,
    WithNeighbour,
    WithOwners,
)

Topology = Literal["ring", "exponential"]
StalenessScale = Literal["1/staleness"]


@dataclass(frozen=True)
class EveryStep(PaceRecipe):
    """The pace that `every_step()` makes."""

    at_work = "window:open_window_pace"

    def exchange(self) -> Exchange:
        return DuringBackward()


@dataclass(frozen=True)
class Accumulate(PaceRecipe):
    """The pace that `accumulate()` makes, its arguments checked."""

    at_work = "window:open_window_pace"

    k: int
    backwards: int = 1

    def __post_init__(self) -> None:
        _check_counts("accumulate", k=(self.k, 1), backwards=(self.backwards, 1))

    def exchange(self) -> Exchange:
        return DuringWindow(self.k)


@dataclass(frozen=True)
class LocalSGD(PaceRecipe):
    """The pace that `local_sgd()` makes, its arguments checked."""

    at_work = "local_sgd:LocalSGDPace"

    k: int
    warmup: int = 0
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        _check_counts("local_sgd", k=(self.k, 1), warmup=(self.warmup, 0))
        if not isinstance(self.optimizer_state, bool):
            raise TypeError(f"local_sgd: optimizer_state must be True or False, got {self.optimizer_state!r}")

    def exchange(self) -> Exchange:
        return BetweenSteps(self.k)


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer that `nesterov()` makes, its arguments checked."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < _number(self.lr) < math.inf:
            raise ValueError(f"nesterov: lr must be a number above 0, got {self.lr!r}")
        if not 0 <= _number(self.momentum) < 1:
            raise ValueError(f"nesterov: momentum must be a number from 0 to below 1, got {self.momentum!r}")
        _make_floats(self, "lr", "momentum")


@dataclass(frozen=True)
class DiLoCo(PaceRecipe):
    """The pace that `diloco()` makes, its arguments checked."""

    at_work = "diloco:DiLoCoPace"

    k: int
    outer: Nesterov = field(default_factory=Nesterov)
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        _check_counts("diloco", k=(self.k, 1), fragments=(self.fragments, 1), delay=(self.delay, 0))
        if not isinstance(self.outer, Nesterov):
            raise TypeError(f"diloco: outer must be gs.nesterov(lr, momentum), got {self.outer!r}")
        if self.k % self.fragments:
            raise ValueError(
                f"diloco: k must be a multiple of fragments, which synchronize k / fragments steps apart, "
                f"got k={self.k} and fragments={self.fragments}"
            )
        if self.delay >= self.k:
            raise ValueError(
                f"diloco: delay must be less than k, since a fragment's exchange ends before its next begins, "
                f"got delay={self.delay} and k={self.k}"
            )
        if not 0 <= _number(self.mixing) <= 1:
            raise ValueError(f"diloco: mixing must be a number from 0 to 1, got {self.mixing!r}")
        _make_floats(self, "mixing")

    def exchange(self) -> Exchange:
        return BetweenSteps(self.k, self.fragments, self.delay, copies=2, passes=5)


@dataclass(frozen=True)
class Delayed(PaceRecipe):
    """The pace that `delayed()` makes, its argument checked."""

    at_work = "delayed:DelayedPace"

    k: int = 1

    def __post_init__(self) -> None:
        _check_counts("delayed", k=(self.k, 1))

    def exchange(self) -> Exchange:
        return DuringNextStep(self.k)


@dataclass(frozen=True)
class AsyncSGD(PaceRecipe):
    """The pace that `async_sgd()` makes, its arguments checked."""

    at_work = "async_sgd.async_pace:AsyncSGDPace"

    max_staleness: int | None = None
    compensate: float | None = None
    scale: StalenessScale | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None:
            _check_counts("async_sgd", max_staleness=(self.max_staleness, 0))
        if self.compensate is not None:
            if not 0 <= _number(self.compensate) < math.inf:
                raise ValueError(
                    f"async_sgd: compensate must be None or a number of at least 0, got {self.compensate!r}"
                )
            _make_floats(self, "compensate")
        if self.scale is not None and self.scale not in get_args(StalenessScale):
            raise ValueError(f'async_sgd: scale must be None or "1/staleness", got {self.scale!r}')

    def exchange(self) -> Exchange:
        return WithOwners()


@dataclass(frozen=True)
class Gossip(PaceRecipe):
    """The pace that `gossip()` makes, its arguments checked."""

    at_work = "gossip:GossipPace"

    topology: Topology = "ring"
    every: int = 1

    def __post_init__(self) -> None:
        _check_counts("gossip", every=(self.every, 1))
        if self.topology not in get_args(Topology):
            raise ValueError(f'gossip: topology must be "ring" or "exponential", got {self.topology!r}')

    def exchange(self) -> Exchange:
        return WithNeighbour(self.every)


# The names under which they stand in a TOML file: `[pace] kind = "accumulate"`.
KINDS: dict[str, type[PaceRecipe]] = {
    "every_step": EveryStep,
    "accumulate": Accumulate,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "delayed": Delayed,
    "async_sgd": AsyncSGD,
    "gossip": Gossip,
}


def every_step() -> EveryStep:
    """Synchronize in every backward: what DDP does."""
    return EveryStep()


def accumulate(k: int, backwards: int = 1) -> Accumulate:
    """Synchronize in every k-th micro-batch; the loop around it stays as it is.

    After the others `.grad` is None, so `step()` and `zero_grad()` do nothing; the k-th leaves the mean
    over ranks and over the k micro-batches. `backwards` is the number of `backward()` calls that one
    micro-batch makes (two losses: 2).

    >>> accumulate(4)
    Accumulate(k=4, backwards=1)
    """
    return Accumulate(k, backwards)


def local_sgd(k: int, warmup: int = 0, optimizer_state: bool = False) -> LocalSGD:
    """Every rank steps by itself; after every k-th step the parameters are averaged.

    In the first `warmup` steps after every one. With `optimizer_state` the optimizers' state (momentum) is
    averaged with them. A compressor gets what changed since the last average, not the parameters themselves.

    >>> local_sgd(8).k
    8
    """
    return LocalSGD(k, warmup, optimizer_state)


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> Nesterov:
    """The outer optimizer of `diloco`: b ← momentum·b + Δ, then w ← w − lr·(Δ + momentum·b).

    >>> nesterov(1.0, 0.0)
    Nesterov(lr=1.0, momentum=0.0)
    """
    return Nesterov(lr, momentum)


def diloco(k: int, outer: Nesterov | None = None, fragments: int = 1, delay: int = 0, mixing: float = 0.0) -> DiLoCo:
    """Every rank takes k inner steps by itself; what they changed is averaged and applied by an outer optimizer.

    With w the last global parameters and p a rank's own, after every k inner steps

        Δ = mean over ranks of (w − p)          compressed, if the plan says so
        w ← outer(w, Δ)                         see `nesterov`
        p ← mixing·p + (1 − mixing)·w

    `fragments` > 1 streams: the parameters fall into so many parts, each synchronizes every k inner steps, and they
    take turns, k / fragments apart. With `delay` the exchange travels during the next so many inner steps, and the
    last two lines happen after them, with the p of then.

    >>> diloco(50, gs_outer := nesterov(0.7, 0.9)).outer == gs_outer
    True
    """
    return DiLoCo(k, Nesterov() if outer is None else outer, fragments, delay, mixing)


def delayed(k: int = 1) -> Delayed:
    """Replicas stay identical and the wire is hidden: step t applies the average of step t − k.

    In the first k steps `.grad` is None, so `step()` does nothing. At the end of training
    `while sync.drain(): optimizer.step(); optimizer.zero_grad()` applies the last k.

    >>> delayed()
    Delayed(k=1)
    """
    return Delayed(k)


def async_sgd(
    max_staleness: int | None, compensate: float | None = None, scale: StalenessScale | None = None
) -> AsyncSGD:
    """Asynchronous SGD: parameters live sharded over the ranks; each rank pushes gradients and pulls parameters.

    `max_staleness` bounds the distance of clocks: a rank that is more than so many steps ahead of the slowest waits; 0
    equals synchronous SGD, None never waits. How many updates of others a gradient then misses at most follows from it:
    `stats()` shows that bound beside what was measured. Every push is an update: with Adam or momentum and
    `max_staleness` above 0 divide the learning rate by about the number of ranks. `compensate` is λ of DC-ASGD:
    g + λ·g·g·(w_now − w_then). `scale="1/staleness"` divides an update's learning rate by its staleness.

    >>> async_sgd(4)
    AsyncSGD(max_staleness=4, compensate=None, scale=None)
    """
    return AsyncSGD(max_staleness, compensate, scale)


def gossip(topology: Topology = "ring", every: int = 1) -> Gossip:
    """Every rank steps by itself and averages with a neighbour only, by push-sum, after every `every`-th step.

    The mean over all ranks is kept, though no rank knows it; `sync.stats()["replica_distance"]` is how far a rank
    was from its neighbour. Every rank has a model of its own, to be saved by that rank, until `sync.drain()` makes the
    mean of all: end a run with it. In "exponential" the neighbour is 1, 2, 4, … ranks away in turn.

    >>> gossip("exponential").every
    1
    """
    return Gossip(topology, every)


def canonical(pace: Pace) -> dict[str, Any]:
    """Plain data that says the same; what is None is left out, since TOML has no word for it.

    >>> canonical(async_sgd(2))
    {'kind': 'async_sgd', 'max_staleness': 2}
    """
    fields: dict[str, Any] = dataclasses.asdict(pace)  # type: ignore[call-overload]
    return {"kind": kind_of(pace), **{key: value for key, value in fields.items() if value is not None}}


def kind_of(pace: Pace) -> str:
    """The name of a pace in a file; of one from outside, the name of its class."""
    return next((name for name, cls in KINDS.items() if isinstance(pace, cls)), type(pace).__name__)


def from_canonical(kind: str, arguments: dict[str, Any]) -> Pace:
    """The pace that `canonical` described; `arguments` without the kind.

    ValueError if they are not those that it takes, or one has a value that it does not take.

    >>> from_canonical("diloco", {"k": 8, "outer": {"lr": 1, "momentum": 0}}).outer
    Nesterov(lr=1.0, momentum=0.0)
    """
    if kind == "diloco" and isinstance(outer := arguments.get("outer"), dict):
        if strange := _unfit(Nesterov, outer):
            raise ValueError(f"diloco: outer does not take {strange}; it takes lr and momentum")
        arguments = arguments | {"outer": Nesterov(**outer)}
    try:
        made: Pace = KINDS[kind](**arguments)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return made


def _unfit(kind: type, arguments: dict[str, Any]) -> list[str]:
    """Names that it does not take, and those without which it cannot be made."""
    fields = dataclasses.fields(kind)
    needed = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    return sorted(set(arguments) - {f.name for f in fields} | needed - set(arguments))


def _check_counts(pace: str, **counts: tuple[object, int]) -> None:
    for name, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{pace}: {name} must be a whole number of at least {least}, got {value!r}")


def _number(value: object) -> float:
    """NaN, which is in no range, for what is no number."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _make_floats(pace: object, *names: str) -> None:
    """Ranks compare plans as text, in which 1 is not 1.0, and -0.0 is not 0.0."""
    for name in names:
        object.__setattr__(pace, name, float(getattr(pace, name)) + 0.0)  # frozen, but not made yet
