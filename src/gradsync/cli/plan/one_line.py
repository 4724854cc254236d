"""The answer in one line; "you do not need this" is one of them, and so is "it does not fit"."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.cli.plan.answer import SMALL, Answer, saving, trains_the_same
from gradsync.cli.plan.device_memory import shortage
from gradsync.cli.plan.figures import show_share
from gradsync.plan.pace_recipe import exchange_of
from gradsync.planner.losses import measured_loss
from gradsync.planner.prediction import Prediction
from gradsync.planner.recommend import SAME, simplest
from gradsync.planner.snippet import in_words
from gradsync.units import show_seconds

_NO_NEED = "You do not need gradsync for speed here:"
_ALL = 0.995  # of the step: shares no longer tell plans apart, seconds do
_ABOUT = 1.5  # times as long as the fastest: not worth a harsher plan
_UNKNOWN = 1e3  # a loss that nobody has measured is reckoned higher than any that was


def in_one_line(answer: Answer) -> str:
    """Say what synchronization costs, what to do about it, and what one could do beyond that."""
    told = _on_speed(answer)
    if not (short := shortage(answer.profile, answer.cluster)):
        return told
    return f"{short[0]} If it did fit: {told[0].lower()}{told[1:]}"


def _on_speed(answer: Answer) -> str:
    if answer.cluster.world_size == 1:
        return "One GPU has nobody to synchronize with: there is nothing to plan."
    chosen = answer.chosen
    gains = saving(chosen, answer.ddp) > SAME
    offered = _offered(offers(answer))
    if answer.slower:
        begin = "Exact averaging is no faster with gradsync here:" if offered else _NO_NEED
        told = f"{begin} with stock DDP a step takes {_cost(answer.ddp)}, with gradsync {_cost(chosen)}"
    elif not answer.needed and not gains:
        return (
            f"{_NO_NEED} exact averaging overlapped with backward, as DDP does it, costs "
            f"{show_share(answer.ddp.overhead)} of a step of {show_seconds(answer.ddp.step_s)}."
        )
    else:
        told = f"With DDP a step will take {show_seconds(answer.ddp.step_s)}, {_share(answer.ddp)} synchronization; "
        if gains:
            name = "gradsync's default" if chosen is answer.usual else in_words(chosen.plan)
            told += f"{name} brings {_brought(chosen)}{_price(chosen, ', and')}"
        else:
            told += f"no plan that {'trains the same' if answer.allow is None else 'you allow'} is clearly faster"
    return " ".join([f"{told}.", *offered])


def offers(answer: Answer) -> tuple[Prediction, ...]:
    """Return the predictions, at most two, that would gain by giving up more than the chosen plan does.

    First the gentlest of those whose loss was measured within 1 % of the exact one; then, if steps of others are much
    shorter still, the gentlest of these. Gentle is what hardly raised a loss where that was measured; another pace is
    harsher than any compression.
    """
    # Against stock DDP too: where gradsync's own plans are slower than that, a gain over them may be none.
    able = [
        it
        for it in (*answer.lossy, *answer.other)
        if saving(it, answer.chosen) > SMALL and saving(it, answer.ddp) > SMALL
    ]
    close = _least_lossy([it for it in able if _is_close(it)])
    boldest = _least_lossy(able)
    found = [it for it in (close, boldest) if it is not None]
    if len(found) == 2 and found[0].step_s <= _ABOUT * found[1].step_s:
        found.pop()
    return tuple(found)


def _least_lossy(found: Sequence[Prediction]) -> Prediction | None:
    """The candidate that loses least of those that take about as long as the fastest."""
    fastest_s = min((it.step_s for it in found), default=0.0)
    option = min((it for it in found if it.step_s <= _ABOUT * fastest_s), key=_lossiness, default=None)
    if option is None:
        return None
    if option.quality == "other training" and option.plan.compress is not None:
        exact = [it for it in found if it.plan.compress is None and saving(option, it) <= SAME]
        option = min(exact, key=_lossiness, default=option)
    return simplest(option, found)


def _is_close(prediction: Prediction) -> bool:
    loss = measured_loss(prediction.plan.compress)
    return prediction.quality != "other training" and loss is not None and loss.close


def _worse(prediction: Prediction) -> float:
    """The share by which the loss was higher, at worst."""
    loss = measured_loss(prediction.plan.compress)
    return _UNKNOWN if loss is None else max(loss.adamw, loss.sgd or 0.0)


def _lossiness(prediction: Prediction) -> tuple[bool, float, float]:
    if prediction.quality != "other training":
        return False, _worse(prediction), prediction.step_s
    return True, 0.0, prediction.step_s


def _offered(found: Sequence[Prediction]) -> list[str]:
    if not found:
        return []
    first, *more = found
    told = f"{in_words(first.plan)} would bring {_brought(first)}{_price(first, ', but')}"
    for it in more:
        told += f"; {in_words(it.plan)} to {_cost(it)}{_price(it, ', but')}"
    return [f"{told}."]


def _brought(prediction: Prediction) -> str:
    what = "it" if exchange_of(prediction.plan.pace).window is None else "a micro-batch"
    return f"{what} to {_cost(prediction)}"


def _cost(prediction: Prediction) -> str:
    return f"{show_seconds(prediction.step_s)} ({show_share(prediction.overhead)})"


def _share(prediction: Prediction) -> str:
    return "nearly all of it" if prediction.overhead >= _ALL else f"{show_share(prediction.overhead)} of it"


def _price(prediction: Prediction, link: str) -> str:
    if trains_the_same(prediction):
        return ""
    if prediction.quality == "other training":
        return f"{link} trains differently"
    worse = _worse(prediction)
    return f"{link} is lossy" if worse == _UNKNOWN else f"{link} is lossy (loss +{show_share(worse)} where measured)"
