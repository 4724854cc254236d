"""The answer in one line; "you do not need this" is one of them."""

from __future__ import annotations

from gradsync.cli.planning.answer import SMALL, WORTH_IT, Answer, saving, trains_the_same
from gradsync.cli.planning.wording import show_share
from gradsync.compress import recipes
from gradsync.paces import EveryStep
from gradsync.planner.prediction import Prediction
from gradsync.planner.snippet import in_words

# By what they did to a loss (docs/compression.md), the gentlest first.
_GENTLE = ("int8", "int4", "powersgd", "sign", "topk", "randomk")


def verdict(answer: Answer) -> str:
    """What synchronization costs, what to do about it, and what one could do beyond that."""
    if answer.cluster.world_size == 1:
        return "One GPU has nobody to synchronize with: there is nothing to plan."
    cost, chosen = show_share(answer.ddp.overhead), answer.chosen
    if not answer.needed:
        return (
            "You do not need gradsync for speed here: exact averaging overlapped with backward, as DDP does it, "
            f"costs {cost} of the step."
        )
    told = f"Synchronization as DDP does it will take {cost} of the step; "
    if saving(chosen, answer.ddp) > WORTH_IT:
        name = "gradsync's default" if chosen is answer.usual else in_words(chosen.plan)
        told += f"{name} brings it to {show_share(chosen.overhead)}{_price(chosen, ', and')}"
    else:
        told += f"no plan that {'trains the same' if trains_the_same(chosen) else 'you allow'} does better"
    option = bolder(answer)
    if option is None:
        return f"{told}."
    return f"{told}. {in_words(option.plan)} would bring it to {show_share(option.overhead)}{_price(option, ', but')}."


def bolder(answer: Answer) -> Prediction | None:
    """What would be gained by giving up more than the chosen plan does.

    The gentlest lossy plan that gains at least half of what any plan would; if there is none, the fastest other pace.
    """
    gains = [(saving(it, answer.chosen), it) for it in (*answer.lossy, *answer.other)]
    enough = max(SMALL, max((gain for gain, _ in gains), default=0.0) / 2)
    able = [it for gain, it in gains if gain > enough]
    return min(able, key=_harshness, default=None)


def _price(prediction: Prediction, link: str) -> str:
    if trains_the_same(prediction):
        return ""
    return f"{link} {'is lossy' if isinstance(prediction.plan.pace, EveryStep) else 'trains differently'}"


def _harshness(prediction: Prediction) -> tuple[bool, int, float]:
    table = recipes.canonical(prediction.plan.compress)
    kind = table.get("inner", table)["kind"]
    place = _GENTLE.index(kind) if kind in _GENTLE else len(_GENTLE)
    if isinstance(prediction.plan.pace, EveryStep):
        return False, place, prediction.step_s
    return True, 0, prediction.step_s
