"""Tables in files: TOML out, and back in with a sentence for each thing that is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from gradsync import files

T = TypeVar("T")
Table = Mapping[str, Any]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def write(path: str | Path, comment: str, table: Table) -> None:
    """A table as a TOML file, under a line that says what it is."""
    text = "\n".join([f"# {comment}", *toml_lines(table)]) + "\n"
    files.write(path, text)


def read(path: str | Path) -> dict[str, Any]:
    """The table of a TOML file."""
    import tomllib  # a whole parser, for the few who read a file

    try:
        return tomllib.loads(files.read(path).decode("utf-8"))
    except OSError as error:
        # With a number as well, Python would say "[Errno 2] …" in the place of the sentence.
        told = type(error)(f"{path} cannot be read ({error.strerror}); pass the path of a TOML file that save() wrote")
        told.strerror = error.strerror
        raise told from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None


def toml_lines(table: Table, path: str = "") -> list[str]:
    """A table as TOML, its numbers and words before its tables, as the format wants it.

    >>> toml_lines({"device": {"name": "cpu", "codecs": [{"kind": "int8"}]}, "sizes": [1, 2.5]})
    ['sizes = [1, 2.5]', '', '[device]', 'name = "cpu"', '', '[[device.codecs]]', 'kind = "int8"']
    """
    lines, below = [], []
    for name, value in table.items():
        key = name if _BARE_KEY.fullmatch(name) else _show(name)
        inside = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            below += ["", f"[{inside}]", *toml_lines(value, inside)]
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                below += ["", f"[[{inside}]]", *toml_lines(item, inside)]
        else:
            lines.append(f"{key} = {_show(value)}")
    return lines + below


def _show(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # inf, -inf, nan: TOML's words too
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError(f"{value!r} holds half a letter (a surrogate), which no text file can")
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise TypeError(f"TOML has no word for {value!r}")


def check_fields(where: str, noun: str, table: object, allowed: Collection[str], needed: Collection[str] = ()) -> Table:
    """The table, if it is one with these fields and no others.

    >>> check_fields("c.toml", "link", {"bandwith": 1e9}, ["bandwidth", "latency_s"])
    Traceback (most recent call last):
    ValueError: c.toml: unknown link field 'bandwith'; a link has bandwidth, latency_s; did you mean 'bandwidth'?
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table of {', '.join(sorted(allowed))}, got {_short(table)}")
    for key in table:
        if key not in allowed:
            near = get_close_matches(key[:100], sorted(allowed), n=1)
            guess = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(allowed))
            raise ValueError(f"{where}: unknown {noun} field {_short(key)}; a {noun} has {known}{guess}")
    for key in needed:
        if key not in table:
            raise ValueError(f"{where}: the field {key!r} is missing; a {noun} needs {' and '.join(needed)}")
    return table


def check_arguments(where: str, kind: str, make: Callable[..., object], arguments: Collection[str]) -> None:
    """Refuse arguments that it does not take, and a call without those that it needs.

    >>> check_arguments("[pace]", "round", round, ["digits"])
    Traceback (most recent call last):
    ValueError: [pace] round does not take ['digits']; it takes number, ndigits
    """
    known = signature(make).parameters
    if unknown := sorted(set(arguments) - set(known)):
        raise ValueError(f"{where} {kind} does not take {unknown}; it takes {', '.join(known) or 'nothing'}")
    if missing := [name for name, it in known.items() if it.default is it.empty and name not in arguments]:
        raise ValueError(f"{where} {kind} needs {', '.join(missing)}")


def check_kind(where: str, table: Table, key: str, kind: type | tuple[type, ...], words: str) -> None:
    """Refuse a field of another type; a missing one is nobody's fault here.

    >>> check_kind("c.toml", {"calibrated": "yes"}, "calibrated", bool, "true or false")
    Traceback (most recent call last):
    ValueError: c.toml: calibrated must be true or false, got 'yes'
    """
    if key in table:
        value = table[key]
        # To Python, true is the number 1; to whoever wrote the file, it is not.
        mistaken = isinstance(value, bool) and kind is not bool
        if mistaken or not isinstance(value, kind):
            raise ValueError(f"{where}: {key} must be {words}, got {_short(value)}")


def make(where: str, build: Callable[..., T], **fields: Any) -> T:
    """Return what `build` makes of the fields; its complaint begins with the place in the file."""
    try:
        return build(**fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from None


def is_comparable(value: object) -> bool:
    """Return whether ranks can compare a recipe: a frozen dataclass, by the name of its class and its fields."""
    made = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return made and bool(type(value).__dataclass_params__.frozen)  # type: ignore[attr-defined]


def kinds(table: object) -> Iterator[str]:
    """Every `kind` in a table and in the tables inside it."""
    if isinstance(table, Mapping):
        yield from (value for key, value in table.items() if key == "kind" and isinstance(value, str))
    if isinstance(table, Mapping | list | tuple):
        for item in table.values() if isinstance(table, Mapping) else table:
            yield from kinds(item)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
