"""One number varied by powers of two: how many GPUs, how fast a network, how large a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gradsync import units
from gradsync.cli.plan.answer import Answer, trains_the_same
from gradsync.cli.plan.what_if import with_bandwidth, with_gpus, with_tokens
from gradsync.cluster import Cluster
from gradsync.plan.sync_plan import Plan
from gradsync.planner.candidates import Allow, candidates
from gradsync.planner.collective import Collectives
from gradsync.planner.goodput import Goodput, goodput
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.recommend import pick, recommend

What = Literal["gpus", "bandwidth", "tokens"]

_PARSERS: dict[str, Callable[[str], float]] = {"gpus": units.count, "bandwidth": units.rate, "tokens": units.count}
_MOST_POINTS = 40
_MOST_GPUS = 1_000_000  # as in the catalogue
FAR = 1024  # GPUs: what lies beyond is labelled


@dataclass(frozen=True)
class Axis:
    """The quantity that is varied, from where to where; rates are those on the box, in bytes per second."""

    what: What
    low: float
    high: float

    def points(self) -> Iterator[float]:
        """The points of the axis: by factors of two, and the end.

        >>> list(Axis("gpus", 8, 100).points())
        [8, 16, 32, 64, 100]
        """
        value = self.low
        while value < self.high:
            yield value
            value *= 2
        yield self.high


@dataclass(frozen=True)
class SweepPoint:
    """The answer for one value.

    Args:
        value: Of what is varied.
        usual: Exact averaging, overlapped: `Plan()`.
        same: The one to use of those that train the same.
        lossy: The fastest lossy one that takes every step; None where there is none.
        best: The fastest of all.
        goodput: What failures leave of the time, if GPUs are varied.
        extrapolated: True: beyond what was measured.
    """

    value: float
    usual: Prediction
    same: Prediction
    lossy: Prediction | None
    best: Prediction
    goodput: Goodput | None
    extrapolated: bool


def parse_axis(text: str) -> Axis:
    """`gpus=8..4096`, `bandwidth=1gbit..400gbit` or `tokens=1024..65536`.

    >>> parse_axis("bandwidth=1gbit..400gbit")
    Axis(what='bandwidth', low=125000000.0, high=50000000000.0)
    """
    what, equals, span = text.partition("=")
    first, dots, last = span.partition("..")
    if what not in get_args(What) or not equals or not dots:
        raise ValueError(f"{text!r} is no sweep: write gpus=8..4096, bandwidth=1gbit..400gbit or tokens=1024..65536")
    low, high = _PARSERS[what](first), _PARSERS[what](last)
    if low > high:
        raise ValueError(f"the sweep {text} is empty: write the smaller number first")
    if high > low * 2**_MOST_POINTS:
        raise ValueError(f"the sweep {text} has more than {_MOST_POINTS} powers of two: take a smaller range")
    if what == "gpus" and high > _MOST_GPUS:
        raise ValueError(f"a cluster has from 1 to {_MOST_GPUS:,} GPUs, got {high!r}")
    return Axis(what, low, high)  # type: ignore[arg-type]  # it is one of them, see above


def sweep(axis: Axis, answer: Answer, allow: Allow = "all") -> list[SweepPoint]:
    """Ask again at each point; bucket sizes and algorithms are left to their defaults there."""
    if axis.what == "gpus":
        _check_hosts(axis, answer.cluster)
    profile, cluster = _varied(axis.what, axis.high, answer)  # at this end all kinds of plan make sense
    plans = [plan for plan in candidates(profile, Collectives(cluster), allow) if _is_plain(plan)]
    return [_point(axis, value, answer, plans) for value in axis.points()]


def _check_hosts(axis: Axis, cluster: Cluster) -> None:
    """Refuse hosts that are not full, and hosts that nothing connects."""
    size = max(map(len, cluster.hosts))
    if len(cluster.hosts) == 1 and axis.high > size and cluster.across == cluster.inside:
        raise ValueError(
            f"a sweep to {axis.high} GPUs needs a network between hosts of {size}: say --network 100g; if --cluster "
            "says what the machines are, probe two hosts under torchrun (gradsync probe --help), or describe the parts "
            "instead of it (--gpus, --per-host, --device, --network)"
        )
    for gpus in axis.points():
        if gpus > size and gpus % size:
            less = gpus - gpus % size
            raise ValueError(f"a sweep over {gpus} GPUs does not fill hosts of {size}: {less} or {less + size} would")


def _is_plain(plan: Plan) -> bool:
    return plan.algorithm is None and plan.bucket_bytes is None and plan.overlap == "backward"


def _point(axis: Axis, value: float, answer: Answer, plans: Sequence[Plan]) -> SweepPoint:
    ranked = recommend(*_varied(axis.what, value, answer), "all", plans)
    usual = next(it for it in ranked if it.plan == Plan())
    lossy = [it for it in ranked if it.quality == "lossy"]
    measured = answer.cluster.world_size if answer.cluster.calibrated else FAR
    return SweepPoint(
        value,
        usual,
        pick([it for it in ranked if trains_the_same(it)]),
        min(lossy, key=lambda it: it.step_s, default=None),
        ranked[0],
        goodput(int(value)) if axis.what == "gpus" else None,
        axis.what == "gpus" and value > measured,
    )


def _varied(what: What, value: float, answer: Answer) -> tuple[ModelProfile, Cluster]:
    if what == "gpus":
        return answer.profile, with_gpus(answer.cluster, int(value))
    if what == "bandwidth":
        return answer.profile, with_bandwidth(answer.cluster, value * answer.arrives)
    return with_tokens(answer.profile, value), answer.cluster


def as_json(axis: Axis, points: list[SweepPoint]) -> dict[str, Any]:
    """The sweep for machines; docs/planning.md tells its fields."""
    return {
        "what": axis.what,
        "points": [
            {
                "value": point.value,
                "default": _part(point.usual),
                "same_training": _part(point.same),
                "lossy": None if point.lossy is None else _part(point.lossy),
                "best": _part(point.best),
                "goodput": None if point.goodput is None else point.goodput.share,
                "extrapolated": point.extrapolated,
            }
            for point in points
        ],
    }


def _part(prediction: Prediction) -> dict[str, Any]:
    return {
        "plan": prediction.plan.canonical(),
        "step_s": prediction.step_s,
        "overhead": prediction.overhead,
        "quality": prediction.quality,
    }
