"""The figures that would change the answer: the network and the batch at which it becomes another, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from gradsync.cli.plan.answer import SMALL, Answer
from gradsync.cli.plan.figures import samples
from gradsync.cli.plan.one_line import offers
from gradsync.cli.plan.what_if import narrow_link, with_bandwidth, with_tokens
from gradsync.planner.predict import predict
from gradsync.planner.prediction import Prediction
from gradsync.planner.snippet import in_words
from gradsync.units import show_bits, show_count

_REACH = 1e4  # how many times as fast, or as large, or as slow, to look
_CLOSE = 1.02  # as near as the sentence is read
_PAYS = 0.01  # of the step
_LIMIT = f"{100 * SMALL:.0f} %"


@dataclass(frozen=True)
class Thresholds:
    """The values at which the answer becomes another; None: nowhere near.

    Args:
        bandwidth: Bytes per second of the narrow link, as the planner counts them, from which on exact averaging costs
            less than 5 % of the step.
        tokens: Per GPU and step, from which on it does.
        break_even: Bytes per second from which on the best compressed candidate no longer pays.
        compressed: That candidate.
    """

    bandwidth: float | None
    tokens: float | None
    break_even: float | None
    compressed: Prediction | None


def find_thresholds(answer: Answer) -> Thresholds:
    """Ask the planner again, a few dozen times."""
    profile, cluster, usual = answer.profile, answer.cluster, answer.usual.plan
    now = narrow_link(cluster).bandwidth
    compressed = _compressed(answer)

    def cheap_on(bandwidth: float) -> bool:
        return predict(profile, with_bandwidth(cluster, bandwidth), usual).overhead < SMALL

    def cheap_with(tokens: float) -> bool:
        return predict(with_tokens(profile, tokens), cluster, usual).overhead < SMALL

    def useless_on(bandwidth: float) -> bool:
        assert compressed is not None
        other = with_bandwidth(cluster, bandwidth)
        exact = predict(profile, other, usual).step_s
        return predict(profile, other, compressed.plan).step_s > (1 - _PAYS) * exact

    return Thresholds(
        bandwidth=least(cheap_on, now / _REACH, now * _REACH),
        tokens=least(cheap_with, profile.tokens / _REACH, profile.tokens * _REACH),
        break_even=None if compressed is None else least(useless_on, now / _REACH, now * _REACH),
        compressed=compressed,
    )


def _compressed(answer: Answer) -> Prediction | None:
    """The compressed candidate: 16 bits if that shrinks anything, else what the verdict speaks of, else the fastest."""
    sixteen = next((it for it in answer.same if it.quality == "16-bit"), None)
    option = next(iter(offers(answer)), None)
    if option is not None and (option.plan.compress is None or option.quality == "other training"):
        option = None
    return sixteen or option or next(iter(answer.lossy), None)


def least(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """The smallest number from low to high for which it holds, if it then holds for all larger ones; None: for none.

    >>> round(least(lambda x: x > 100, 1, 1e6))
    101
    >>> least(lambda x: False, 1, 10)
    """
    if not holds(high):
        return None
    if holds(low):
        return low
    while high / low > _CLOSE:
        middle = sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def changes(answer: Answer, found: Thresholds) -> list[str]:
    """The thresholds in sentences."""
    if answer.cluster.world_size == 1:
        return []
    return [_on_bandwidth(answer, found), *_on_compression(answer, found), _on_tokens(answer, found)]


def _on_bandwidth(answer: Answer, found: Thresholds) -> str:
    now = _named(answer, narrow_link(answer.cluster).bandwidth)
    link = "between hosts" if len(answer.cluster.hosts) > 1 else "inside the host"
    if found.bandwidth is None:
        return (
            f"No bandwidth {link} up to {_REACH:,.0f} times this one brings exact averaging under {_LIMIT}: "
            "what is left is not the wire's."
        )
    limit_at = _named(answer, found.bandwidth)
    if answer.usual.overhead < SMALL:
        return f"Exact averaging stays under {_LIMIT} down to {limit_at} {link} (now {now})."
    return f"Exact averaging falls under {_LIMIT} from {limit_at} {link} on (now {now})."


def _named(answer: Answer, bandwidth: float) -> str:
    """A bandwidth by the rate that stands on the box."""
    return show_bits(bandwidth / answer.arrives)


def _on_compression(answer: Answer, found: Thresholds) -> list[str]:
    if found.compressed is None:
        return []
    name, now = in_words(found.compressed.plan), narrow_link(answer.cluster).bandwidth
    if found.break_even is None:
        return [f"{name} pays at any bandwidth."]
    if found.break_even <= 1.01 * now / _REACH:
        return [f"{name} does not pay at any bandwidth."]
    pays = "pays" if found.break_even > now else "would pay"
    return [f"{name} {pays} below {_named(answer, found.break_even)}; above, exact averaging is as fast."]


def _on_tokens(answer: Answer, found: Thresholds) -> str:
    if found.tokens is None:
        return f"No batch up to {_REACH:,.0f} times this one brings exact averaging under {_LIMIT}."
    batch, now = (
        f"{show_count(round(found.tokens))} {samples(answer.profile)} per GPU and step",
        show_count(answer.profile.tokens),
    )
    if answer.profile.tokens == 1:  # nobody counted them
        batch, now = f"{found.tokens:.2g} times the batch", "1"
    if answer.usual.overhead < SMALL:
        return f"It stays under {_LIMIT} down to {batch} (now {now})."
    return f"It falls under {_LIMIT} from {batch} on (now {now})."
