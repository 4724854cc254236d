"""The answer in one line; "you do not need this" is one of them."""

from __future__ import annotations

from gradsync.cli.planning.answer import SMALL, Answer, saving, trains_the_same
from gradsync.cli.planning.wording import show_share
from gradsync.compress import recipes
from gradsync.paces import EveryStep
from gradsync.planner.prediction import Prediction
from gradsync.planner.recommending import SAME
from gradsync.planner.snippet import in_words
from gradsync.units import show_seconds

_NO_NEED = "You do not need gradsync for speed here:"
_TAKES = "Synchronization as DDP does it will take"
_ALL = 0.995  # of the step: shares no longer tell plans apart, seconds do

# By what they did to a loss (docs/compression.md), the gentlest first.
_GENTLE = ("int8", "int4", "powersgd", "sign", "topk", "randomk")


def verdict(answer: Answer) -> str:
    """What synchronization costs, what to do about it, and what one could do beyond that."""
    if answer.cluster.world_size == 1:
        return "One GPU has nobody to synchronize with: there is nothing to plan."
    cost, chosen = _cost(answer.ddp, " of the step"), answer.chosen
    gains = saving(chosen, answer.ddp) > SAME
    if answer.slower:
        told = f"{_NO_NEED} stock DDP costs {cost}, gradsync {_cost(chosen)}"
    elif not answer.needed and not gains:
        return f"{_NO_NEED} exact averaging overlapped with backward, as DDP does it, costs {cost}."
    elif gains:
        name = "gradsync's default" if chosen is answer.usual else in_words(chosen.plan)
        told = f"{_TAKES} {cost}; {name} brings it to {_cost(chosen)}{_price(chosen, ', and')}"
    else:
        which = "trains the same" if trains_the_same(chosen) else "you allow"
        told = f"{_TAKES} {cost}; no plan that {which} does better"
    option = bolder(answer)
    if option is None:
        return f"{told}."
    return f"{told}. {in_words(option.plan)} would bring it to {_cost(option)}{_price(option, ', but')}."


def bolder(answer: Answer) -> Prediction | None:
    """What would be gained by giving up more than the chosen plan does.

    The gentlest lossy plan that gains at least half of what any plan would; if there is none, the fastest other pace,
    without compression if that is about as fast.
    """
    gains = [(saving(it, answer.chosen), it) for it in (*answer.lossy, *answer.other)]
    enough = max(SMALL, max((gain for gain, _ in gains), default=0.0) / 2)
    # Against stock DDP too: where gradsync's own plans are slower than that, a gain over them may be none.
    able = [it for gain, it in gains if gain > enough and saving(it, answer.ddp) > SMALL]
    option = min(able, key=_harshness, default=None)
    if option is None or isinstance(option.plan.pace, EveryStep) or option.plan.compress is None:
        return option
    plain = [it for it in able if it.plan.compress is None and saving(option, it) <= SAME]
    return min(plain, key=_harshness, default=option)


def _cost(prediction: Prediction, of: str = "") -> str:
    share = show_share(prediction.overhead) + of
    return f"{share}, {show_seconds(prediction.step_s)}" if prediction.overhead >= _ALL else share


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
