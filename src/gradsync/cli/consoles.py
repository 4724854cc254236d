"""Where results are printed."""

from __future__ import annotations

from rich.console import Console


def wide_console() -> Console:
    """Stdout; into a file or pipe there is no width to fit, so wide enough that no cell wraps."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=120)
