"""Error feedback: what compression loses is kept, and added to the next gradient, so that nothing is lost for good.

Warm-up: the first synchronizations go as they are, while gradients are large and change fast.

Across hosts: as it is where links are fast, compressed where they are slow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsync.compress.param import Param
from gradsync.compress.recipe import Choice, Compressor, check_inner, check_whole


@dataclass(frozen=True)
class ErrorFeedback:
    """The recipe that `error_feedback()` makes: `inner`, with what it loses kept for the next gradient."""

    inner: Compressor

    def __post_init__(self) -> None:
        check_inner("error_feedback", self.inner)

    def choose(self, param: Param) -> Choice:
        choice = self.inner.choose(param)
        return choice if choice.codec is None else replace(choice, feedback=True)


def error_feedback(inner: Compressor) -> ErrorFeedback:
    """Keep what `inner` loses and add it to the next gradient: sent + kept == gradient + kept before.

    Biased compressors (`sign`, `topk`, rounding to the nearest) need it to converge, and have it unless told
    otherwise. It costs memory: one more copy of the gradients it is used for, on each rank.

    >>> from gradsync.compress.cast import bf16
    >>> error_feedback(bf16()).choose(Param("weight", (4, 4))).feedback
    True
    >>> error_feedback(error_feedback(bf16()))
    ErrorFeedback(inner=Bf16())
    """
    return inner if isinstance(inner, ErrorFeedback) else ErrorFeedback(inner)


def with_feedback(name: str, codec: Compressor, feedback: bool) -> Compressor:
    """Return what a factory that takes `feedback` returns."""
    if not isinstance(feedback, bool):
        raise TypeError(f"{name}: feedback must be True or False, got {feedback!r}")
    return error_feedback(codec) if feedback else codec


@dataclass(frozen=True)
class Warmup:
    """The recipe that `warmup()` makes: `inner`, after so many exact steps."""

    inner: Compressor
    steps: int

    def __post_init__(self) -> None:
        check_inner("warmup", self.inner)
        check_whole("warmup: steps", self.steps, 1)

    def choose(self, param: Param) -> Choice:
        choice = self.inner.choose(param)
        return choice if choice.codec is None else replace(choice, exact_steps=max(self.steps, choice.exact_steps))


def warmup(inner: Compressor, steps: int) -> Warmup:
    """Send `steps` synchronizations as they are, then compress by `inner`. Of two, one in the other, the longer counts.

    >>> from gradsync.compress.powersgd import powersgd
    >>> warmup(powersgd(4), steps=1000).choose(Param("weight", (512, 512))).exact_steps
    1000
    """
    return Warmup(inner, steps)


@dataclass(frozen=True)
class AcrossHosts:
    """The recipe that `across_hosts()` makes: `inner`, between hosts only."""

    inner: Compressor

    def __post_init__(self) -> None:
        check_inner("across_hosts", self.inner)

    def choose(self, param: Param) -> Choice:
        choice = self.inner.choose(param)
        return choice if choice.codec is None else replace(choice, across=True)


def across_hosts(inner: Compressor) -> AcrossHosts:
    """Add up exactly inside each host, and compress by `inner` only what travels between hosts.

    >>> from gradsync.compress.integers import int8
    >>> across_hosts(int8()).choose(Param("weight", (64, 64))).across
    True
    """
    return inner if isinstance(inner, AcrossHosts) else AcrossHosts(inner)
