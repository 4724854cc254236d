"""Sizes as a user writes them, 1K,1M or 1K..256M, and as a table shows them; pure."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d{1,12})([KMG]?)B?", re.IGNORECASE)
_FACTOR = 4
_LARGEST = 16 * 2**30


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of each size, ascending; `a..b` goes from a in steps of factor 4 as long as it is no more than b.

    >>> parse_sizes("1K,25M")
    (1024, 26214400)
    >>> parse_sizes("1K..64K")
    (1024, 4096, 16384, 65536)
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not dots:
            sizes.add(_parse_size(first))
            continue
        size, end = _parse_size(first), _parse_size(last)
        if size > end:
            raise ValueError(f"the range {part.strip()} is empty: write the smaller size first")
        while size <= end:
            sizes.add(size)
            size *= _FACTOR
    return tuple(sorted(sizes))


def show_size(nbytes: int) -> str:
    """The size, written as short as it can be without a rounding.

    >>> show_size(1024), show_size(25 * 2**20), show_size(1000)
    ('1K', '25M', '1000')
    """
    for unit, factor in reversed(_UNITS.items()):
        if nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    raise AssertionError("every whole number is a multiple of 1")


def _parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text.strip()!r} is no size: write bytes, or a number with K, M or G, such as 25M")
    nbytes = int(found[1]) * _UNITS[found[2].upper()]
    if not 1 <= nbytes <= _LARGEST:
        raise ValueError(f"{text.strip()} is out of range: sizes go from 1 byte to {show_size(_LARGEST)}")
    return nbytes
