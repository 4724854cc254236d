"""What mkdocstrings asks of each docstring: examples that stand in it bare become blocks of Python."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

# From a line that begins with >>> to the next blank one, at one indentation.
_EXAMPLE = re.compile(r"(?:^|\n)((?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*)")


class Doctests(Extension):
    """Fences examples, so that they are shown as code and not as quotations."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for everything that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The same text with a fence around each example.

    >>> fenced("One.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['One.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    return _EXAMPLE.sub(lambda found: f"\n```pycon\n{found[1]}\n```", text)
