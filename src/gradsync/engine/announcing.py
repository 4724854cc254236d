"""What `gs.auto()` tells in rank 0's log, as sentences. Pure, except `say`."""

from __future__ import annotations

import sys

from gradsync.plan import Plan
from gradsync.planner.prediction import Prediction
from gradsync.planner.snippet import in_words
from gradsync.units import show_seconds


def say(sentence: str) -> None:
    """In one write: the ranks of all hosts often share one terminal."""
    sys.stderr.write(f"gradsync: {sentence}\n")
    sys.stderr.flush()


def choice(chosen: Prediction, default: Prediction, step: int, calibrated: bool) -> str:
    """What was chosen, what it will take, why, and what the default would take."""
    share = f"{show_seconds(chosen.step_s)} a step predicted, {100 * chosen.overhead:.0f} % of it synchronization"
    figures = "measured here" if calibrated else "not measured here"
    if chosen.plan == Plan():
        return f"auto keeps the default plan from step {step} on: {share} (links {figures}); {chosen.reason}"
    return (
        f"auto chose {in_words(chosen.plan)} from step {step} on: {share} (links {figures}); {chosen.reason}. "
        f"The default plan would take {show_seconds(default.step_s)}"
    )


def miss(measured_s: float, predicted_s: float, step: int, steps: int) -> str:
    """That the prediction did not hold, and what follows."""
    off, measured, predicted = 100 * (measured_s / predicted_s - 1), show_seconds(measured_s), show_seconds(predicted_s)
    return (
        f"auto measured {measured} a step at step {step} where {predicted} were predicted ({off:+.0f} %): "
        f"{steps} steps are profiled again, exactly, and a plan is chosen anew"
    )
