"""Shares, milliseconds and names, as people read them in a table."""

from __future__ import annotations

from gradsync.planner.known_models import ARCHITECTURES
from gradsync.planner.profile import ModelProfile
from gradsync.units import show_seconds

_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}  # of `show_seconds`


def show_share(share: float) -> str:
    """A part of the step; small ones to a tenth or a hundredth of a percent.

    >>> [show_share(x) for x in (0, 0.00004, 0.0005, 0.012, 0.0999, 0.36, 0.998, 1)]
    ['0 %', '<0.01 %', '0.05 %', '1.2 %', '10 %', '36 %', '>99 %', '100 %']
    """
    percent = 100 * share
    if 99.5 <= percent < 100:
        return ">99 %"
    if 0 < percent < 0.01:
        return "<0.01 %"
    decimals = 0 if percent >= 9.95 or percent == 0 else 1 if percent >= 0.095 else 2
    return f"{percent:.{decimals}f} %"


def show_ms(seconds: float) -> str:
    """The text for a column of milliseconds: three digits, but no more than hundredths.

    >>> [show_ms(x) for x in (0, 0.0000123, 0.00123, 0.0123, 12.3)]
    ['0', '0.01', '1.23', '12.3', '12300']
    """
    ms = 1e3 * seconds
    decimals = 0 if ms == 0 or ms >= 99.95 else 1 if ms >= 9.995 else 2
    return f"{ms:.{decimals}f}"


def show_interval(low_s: float, high_s: float) -> str:
    """
    >>> show_interval(0.0123, 0.1)
    '12.3–100'
    """
    return f"{show_ms(low_s)}–{show_ms(high_s)}"


def show_span(low_s: float, high_s: float) -> str:
    """An interval in one unit.

    >>> show_span(30.7, 87.31), show_span(0.0307, 1.2), show_span(0.342, 0.751)
    ('30.7–87.3 s', '0.0307–1.2 s', '342–751 ms')
    """
    number, unit = show_seconds(high_s).split(" ")
    return f"{float(f'{low_s / _UNITS[unit]:.3g}'):,g}–{number} {unit}"


def show_saving(share: float) -> str:
    """
    >>> [show_saving(x) for x in (0.162, -0.024, 0.001, -0.001)]
    ['16 %', '−2 %', '0 %', '0 %']
    """
    percent = round(100 * share)
    return f"{'−' if percent < 0 else ''}{abs(percent)} %"


def samples(profile: ModelProfile) -> str:
    """Return what a batch is made of.

    >>> from gradsync.planner.known_models import architecture
    >>> samples(architecture("resnet50")), samples(architecture("gpt2"))
    ('images', 'tokens')
    """
    known = ARCHITECTURES.get(profile.name)
    return "images" if known is not None and known.images else "tokens"


def printable(text: str) -> str:
    """A name from a file that anybody may have written, without what would move a cursor or start a line.

    >>> printable("\\x1b[31mred\\nlines and 網 stay")
    '�[31mred�lines and 網 stay'
    """
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
