"""What `async_sgd` was told."""

from __future__ import annotations

from typing import NamedTuple


class Settings(NamedTuple):
    """As the recipe validated them.

    `max_staleness` bounds the distance of clocks at a read, None: it is not bounded. `compensate` is λ of DC-ASGD.
    `scale` is "1/staleness" or None.
    """

    max_staleness: int | None
    compensate: float | None = None
    scale: str | None = None
