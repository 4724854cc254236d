"""What `gs.auto()` tells in rank 0's log, as sentences. Pure, except `say`."""

from __future__ import annotations

import sys

from gradsync.plan import Plan
from gradsync.planner.prediction import Prediction


def say(sentence: str) -> None:
    """In one write: the ranks of all hosts often share one terminal."""
    sys.stderr.write(f"gradsync: {sentence}\n")
    sys.stderr.flush()


def choice(chosen: Prediction, default: Prediction, step: int, calibrated: bool) -> str:
    """What was chosen, what it will take, why, and what the default would take."""
    share = f"{show_s(chosen.step_s)} a step predicted, {100 * chosen.overhead:.0f} % of it synchronization"
    figures = "measured here" if calibrated else "not measured here"
    if chosen.plan == Plan():
        return f"auto keeps the default plan from step {step} on: {share} (links {figures}); {chosen.reason}"
    return (
        f"auto chose {in_words(chosen.plan)} from step {step} on: {share} (links {figures}); {chosen.reason}. "
        f"The default plan would take {show_s(default.step_s)}"
    )


def miss(measured_s: float, predicted_s: float, step: int, steps: int) -> str:
    """That the prediction did not hold, and what follows."""
    off = 100 * (measured_s / predicted_s - 1)
    return (
        f"auto measured {show_s(measured_s)} a step at step {step} where {show_s(predicted_s)} were predicted "
        f"({off:+.0f} %): {steps} steps are profiled again, exactly, and a plan is chosen anew"
    )


def in_words(plan: Plan) -> str:
    """What differs from the default.

    >>> from gradsync.compress.cast import bf16
    >>> in_words(Plan(compress=bf16(), bucket_bytes=1 << 20)), in_words(Plan(overlap="none"))
    ('bf16, buckets of 1 MiB', 'exact, no overlap')
    """
    table = plan.canonical()
    words = [table["compress"]["kind"] if plan.compress is not None else "exact"]
    if plan.algorithm is not None:
        words.append(table["algorithm"]["kind"])
    if plan.bucket_bytes is not None:
        words.append(f"buckets of {plan.bucket_bytes / (1 << 20):.3g} MiB")
    if plan.overlap == "none":
        words.append("no overlap")
    return ", ".join(words)


def show_s(seconds: float) -> str:
    """
    >>> show_s(0.0123), show_s(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
