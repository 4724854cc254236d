"""Error feedback: what compression loses is kept, and added to the next gradient, so that nothing is lost for good."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsync.compress.arguments import check_inner
from gradsync.compress.choice import Choice, Compressor, Param


@dataclass(frozen=True)
class ErrorFeedback:
    """See `error_feedback`."""

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
    """What a factory that takes `feedback` returns."""
    if not isinstance(feedback, bool):
        raise TypeError(f"{name}: feedback must be True or False, got {feedback!r}")
    return error_feedback(codec) if feedback else codec
