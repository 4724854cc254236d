"""SLURM's compressed host lists, written out: `node[01-03,07]-ib,login1`."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str) -> Iterator[str]:
    """The hosts of a node list, in SLURM's order: the task 0 of a step is on the first.

    >>> list(expand_hosts("node[01-03,07]-ib,login1"))
    ['node01-ib', 'node02-ib', 'node03-ib', 'node07-ib', 'login1']
    """
    start = 0
    while match := _NAME.match(text, start):
        yield from _expand_name(match.group())
        start = match.end() + 1
        if match.end() == len(text):
            return
        if text[match.end()] != ",":
            break
    raise ValueError(f"{text!r} is not a SLURM node list such as node[01-03,07],login1")


def _expand_name(name: str) -> Iterator[str]:
    """One name with any number of bracketed sets; the last set turns fastest."""
    head, bracket, rest = name.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    for number in _expand_set(inside):
        for end in _expand_name(tail):
            yield head + number + end


def _expand_set(inside: str) -> Iterator[str]:
    for span in inside.split(","):
        match = _SPAN.fullmatch(span)
        if match is None:
            raise ValueError(f"[{inside}] is not a set of numbers such as [01-03,07]")
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first):
            raise ValueError(f"[{inside}] has the span {span}, which runs backwards")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
