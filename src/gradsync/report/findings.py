"""What a report is made of, besides sentences on ranks and links."""

from __future__ import annotations

from typing import NamedTuple


class Fact(NamedTuple):
    """One number of the report."""

    name: str
    value: str
    meaning: str


class Warned(NamedTuple):
    """Something to look at, and what to do."""

    text: str
    advice: str
