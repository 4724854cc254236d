"""Warm-up: the first synchronizations go as they are, while gradients are large and change fast."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsync.compress.arguments import check_inner, check_whole
from gradsync.compress.choice import Choice, Compressor, Param


@dataclass(frozen=True)
class Warmup:
    """See `warmup`."""

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
