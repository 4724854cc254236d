"""Quantities as people write them: "100g" and "5us" in, bytes and seconds out, and the other way round.

Networks are sold in bits, memory in bytes, and both are spoken of as "gigs". So a bare letter after a number is a
network's: 100g is 100 Gbit/s, which is 12.5 GB/s. A small b is a bit, a capital B a byte.
"""

from __future__ import annotations

import re
from decimal import Decimal

_MOST_LETTERS = 40
_LARGEST = 1e24  # more than anybody's bytes, parameters or seconds; also what a float still divides safely

_NUMBER = r"([+-]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,4})?|[+-]?inf(?:inity)?|[+-]?nan)"
_QUANTITY = re.compile(_NUMBER + r"\s*([a-zµ/]*)", re.IGNORECASE | re.ASCII)

_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}

_BITS = re.compile(r"([kmgt]?)(?:(?:bit|bits)(?:/s)?|bps|b/s)")
_BYTES = re.compile(r"([kmgt]i?|)B")

_RATES = (
    "100g or 100gbit (networks are sold in bits: 100g = 100 Gbit/s = 12.5 GB/s), 2.5gbit, 100mbit, "
    "or 12.5GB/s, 900MB/s (a capital B is a byte)"
)
_AMOUNTS = "25MiB (1024 x 1024 bytes), 4MB (1000 x 1000) or 4096B; a capital B is a byte"
_TIMES = "5us, 3ms, 2s, 10min or 4h"
_WHOLE = "a whole number such as 8192, 7k, 350m, 1b or 1e9 (k: thousand, m: million, b: billion, t: trillion)"


def rate(text: str) -> float:
    """Bytes per second.

    >>> rate("100g"), rate("2.5gbit"), rate("900MB/s")
    (12500000000.0, 312500000.0, 900000000.0)
    """
    number, unit = _split(text, "rate", _RATES)
    if not unit:
        raise ValueError(f"{text!r} is no rate, for it has no unit: write {_RATES}")
    if (bare := unit.lower()) in _THOUSANDS:
        return _positive(text, number * _THOUSANDS[bare] / 8, "rate", _RATES)
    if unit.endswith(("B/s", "Bps")) and (found := _BYTES.fullmatch(_small(unit[:-2]))):
        return _positive(text, number * (_THOUSANDS | _BINARY)[found[1]], "rate", _RATES)
    # "GBit/s" is no byte: only a B that stands alone is one.
    bits = unit.lower() if "bit" in unit.lower() or "B" not in unit else unit
    if found := _BITS.fullmatch(bits):
        return _positive(text, number * _THOUSANDS[found[1]] / 8, "rate", _RATES)
    hint = " (an amount, not a rate: per second is missing)" if _BYTES.fullmatch(_small(unit)) else ""
    raise ValueError(f"{text!r} is no rate{hint}: write {_RATES}")


def count(text: str) -> int:
    """A whole number of at least 1.

    >>> count("1e9"), count("350m"), count("1.5k"), count("1_000_000")
    (1000000000, 350000000, 1500, 1000000)
    """
    number, unit = _split(text, "count", _WHOLE)
    if unit.lower() not in _COUNTS:
        raise ValueError(f"{text!r} is no count: write {_WHOLE}")
    return _whole(text, number * _COUNTS[unit.lower()], "count", _WHOLE)


def seconds(text: str) -> float:
    """Seconds, 0 or more.

    >>> seconds("5us"), seconds("3ms"), seconds("2s")
    (5e-06, 0.003, 2.0)
    """
    number, unit = _split(text, "time", _TIMES)
    if unit.lower() not in _SECONDS:
        missing = ", for it has no unit" if not unit else ""
        raise ValueError(f"{text!r} is no time{missing}: write {_TIMES}")
    return float(number * _SECONDS[unit.lower()])


def nbytes(text: str) -> int:
    """A whole number of bytes, at least 1.

    >>> nbytes("25MiB"), nbytes("4MB"), nbytes("4096B")
    (26214400, 4000000, 4096)
    """
    number, unit = _split(text, "amount of bytes", _AMOUNTS)
    if not (found := _BYTES.fullmatch(_small(unit))):
        missing = ", for it has no unit" if not unit else ""
        raise ValueError(f"{text!r} is no amount of bytes{missing}: write {_AMOUNTS}")
    return _whole(text, number * (_THOUSANDS | _BINARY)[found[1]], "amount of bytes", _AMOUNTS)


def show_rate(bytes_per_s: float) -> str:
    """Bytes per second, for people.

    >>> show_rate(12.5e9), show_rate(90e6)
    ('12.5 GB/s', '90 MB/s')
    """
    return _show(bytes_per_s, [(1, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s"), (1e12, "TB/s")])


def show_bits(bytes_per_s: float) -> str:
    """Bytes per second as bits, in which networks are sold.

    >>> show_bits(12.5e9), show_bits(12.5e6)
    ('100 Gbit/s', '100 Mbit/s')
    """
    units = [(1.0, "bit/s"), (1e3, "kbit/s"), (1e6, "Mbit/s"), (1e9, "Gbit/s"), (1e12, "Tbit/s")]
    return _show(8 * bytes_per_s, units)


def show_seconds(seconds: float) -> str:
    """Seconds, for people.

    >>> show_seconds(0.01522), show_seconds(5e-6), show_seconds(0.9999), show_seconds(7200)
    ('15.2 ms', '5 µs', '1 s', '2 h')
    """
    if abs(seconds) >= 600:
        return _show(seconds, [(60, "min"), (3600, "h")], steps=60)
    return _show(seconds, [(1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1, "s")])


def show_nbytes(nbytes: float) -> str:
    """Bytes, for people.

    >>> show_nbytes(4096), show_nbytes(2e9), show_nbytes(25 << 20)
    ('4.1 kB', '2 GB', '26.2 MB')
    """
    return _show(nbytes, [(1, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB")])


def show_count(count: float) -> str:
    """A number of things, for people.

    >>> show_count(8192), show_count(124_439_808), show_count(1e9)
    ('8,192', '124 million', '1 billion')
    """
    if abs(count) < 999_500:
        return f"{count:,.0f}"
    return _show(count, [(1e6, "million"), (1e9, "billion"), (1e12, "trillion")])


def _split(text: str, what: str, allowed: str) -> tuple[Decimal, str]:
    """The number and the letters behind it; numbers stay exact until a unit has multiplied them."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no {what}, for it has no unit: write {allowed}")
    if len(text) > _MOST_LETTERS:
        raise ValueError(f"{text[:20]!r}... with {len(text)} letters is no {what}: write {allowed}")
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no {what}: write {allowed}")
    number = Decimal(found[1])
    if not number.is_finite() or number.copy_abs() > Decimal(_LARGEST):
        raise ValueError(f"{text!r} is no {what}, for it must be a finite number: write {allowed}")
    if number < 0:
        raise ValueError(f"{text!r} is no {what}, for it is negative: write {allowed}")
    return number, found[2]


def _positive(text: str, value: Decimal, what: str, allowed: str) -> float:
    if not float(value):
        raise ValueError(f"{text!r} is no {what}, for nothing would ever arrive at zero: write {allowed}")
    return float(value)


def _whole(text: str, value: Decimal, what: str, allowed: str) -> int:
    if not 1 <= value <= Decimal(_LARGEST) or value != value.to_integral_value():
        raise ValueError(f"{text!r} is no {what}, for it must be a whole number of at least 1: write {allowed}")
    return int(value)


def _small(unit: str) -> str:
    """The prefix in small letters, the B as it was written."""
    return unit[:-1].lower() + unit[-1:]


def _show(value: float, units: list[tuple[float, str]], steps: int = 1000) -> str:
    """Three digits and the first unit in which they suffice."""
    for size, name in units:
        shown = float(f"{value / size:.3g}")
        if abs(shown) < steps or name == units[-1][1]:
            break
    return f"{shown:,g} {name}"
