"""The answer to who asks for a part that the catalogue does not have."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name: object, names: Iterable[str], besides: str = "") -> str:
    """One sentence with the near names and all of them.

    >>> unknown("device", "a10O", ["a100", "cpu"])
    "there is no device 'a10O' in the catalogue, did you mean a100? It has a100, cpu"
    """
    names = list(names)
    shown = repr(name) if len(repr(name)) <= 42 else f"{repr(name)[:40]}..."
    near = get_close_matches(str(name).lower()[:40], names, n=3, cutoff=0.5)
    guess = f", did you mean {' or '.join(near)}?" if near else ":"
    return (
        f"there is no {what} {shown} in the catalogue{guess} {'It' if near else 'it'} has {', '.join(names)}{besides}"
    )
