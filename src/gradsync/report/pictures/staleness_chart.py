"""The staleness of applied updates, as a histogram: by powers of two, as paces count them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from gradsync import svg
from gradsync.report.pictures.frame import Drawing, Frame, picture
from gradsync.report.wording import show_share
from gradsync.trace.reader import RankTrace, RunTrace

# All in px.
_TOP, _HIGH, _FOOT = 22, 150, 24

_KEY = re.compile(r"staleness_histogram_([0-9]{1,9})(?:_([0-9]{1,9}))?")


def counts(run: RunTrace) -> dict[tuple[int, int], int]:
    """Updates by (lowest, highest) staleness of their class, over all ranks; rising."""
    found: Counter[tuple[int, int]] = Counter()
    for trace in run.ranks.values():
        found.update(_told(trace))
    return dict(sorted(found.items()))


def draw_staleness(run: RunTrace) -> str:
    """The figure with its caption; empty for a run in which nothing is ever stale."""
    found = counts(run)
    total = sum(found.values())
    if not total or not any(high for (_, high), count in found.items() if count):
        return ""
    foot = _TOP + _HIGH

    def draw(frame: Frame) -> Drawing:
        floor = svg.line("grid", frame.left, foot, frame.end, foot)
        return foot + _FOOT, [floor, *_bars(frame, found, total, foot)]

    drawing = picture("staleness", f"Histogram of the staleness of {total} updates", draw)
    return f"{drawing}<p>Updates by the number of versions they missed, {total:,} in all.</p>"


def _told(trace: RankTrace) -> dict[tuple[int, int], int]:
    """Return what a pace counted itself; the last word holds all."""
    for stats in reversed(trace.stats):
        named = {_KEY.fullmatch(key): value for key, value in stats.stats.items()}
        found = {
            (int(name[1]), int(name[2] or name[1])): int(value)
            for name, value in named.items()
            if name is not None and isinstance(value, int | float) and value >= 0
        }
        if found:
            return found
    return {}


def _bars(frame: Frame, found: Mapping[tuple[int, int], int], total: int, foot: float) -> Iterator[str]:
    highest = max(found.values())
    width = min(110.0, frame.plot / len(found))
    for index, ((low, high), count) in enumerate(found.items()):
        x, height = frame.left + width * index, _HIGH * count / highest
        label = str(low) if low == high else f"{low}–{high}"
        says = f"staleness {label}: {count:,} updates, {show_share(count / total)}"
        yield svg.rect("wire", x + 4, foot - height, width - 8, height, frame.tip(says))
        yield svg.text("x pale", x + width / 2, foot - height - 6, show_share(count / total))
        yield svg.text("x", x + width / 2, foot + 17, label)
