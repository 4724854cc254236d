"""Texts on a page. Names come from files that anybody may have written: shortened, made visible, escaped."""

from __future__ import annotations

from html import escape

_MOST_LETTERS = 600


def shown(text: str, most: int = _MOST_LETTERS) -> str:
    """HTML for a text: what has no shape (escapes, direction marks, halves of letters) becomes �.

    >>> shown("<b>\\u202ename\\x1b")
    '&lt;b&gt;�name�'
    >>> shown("encoder.layers.17.attention.weight", 15)
    'encoder….weight'
    """
    visible = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in cut(text, most))
    return escape(visible)


def name(text: str, most: int = 80) -> str:
    """HTML for a name inside a sentence: apart in its direction, and whole in its tooltip if it had to be cut."""
    whole = f' title="{shown(text)}"' if len(text) > most else ""
    return f"<bdi{whole}>{shown(text, most)}</bdi>"


def cut(text: str, most: int) -> str:
    """The text with at most so many letters; the middle goes, since names differ at their ends.

    >>> cut("layer.weight", 7)
    'lay…ght'
    """
    if len(text) <= most:
        return text
    left = most // 2
    return f"{text[:left]}…{text[len(text) - (most - left - 1) :]}"


def steps(first: int, last: int) -> str:
    """
    >>> steps(4, 4), steps(4, 9)
    ('step 4', 'steps 4–9')
    """
    return f"step {first}" if first == last else f"steps {first}–{last}"
