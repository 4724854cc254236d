"""Profiles in files: a table of times, and below it one of each gradient, in the order of backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradsync import tables

Row = tuple[str, tuple[int, ...], torch.dtype, float]  # a gradient: name, shape, dtype, ready_s

_COMMENT = "A gradsync model profile: gs.ModelProfile.load(path)"
_NUMBERS = ("forward_s", "backward_s", "optimizer_s", "input_s", "tokens", "jitter")
_FIELDS = ("name", "source", *_NUMBERS, "gradients")
_ROW_FIELDS = ("name", "shape", "dtype", "ready_s")
_SECONDS = "a number of seconds since backward began, 0 or more"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS}


def write(path: str | Path, fields: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """A profile's fields and its gradients as TOML; a field that is None is left out."""
    table = {name: value for name, value in fields.items() if value is not None}
    gradients = [
        {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "ready_s": ready_s}
        for name, shape, dtype, ready_s in rows
    ]
    tables.write(path, _COMMENT, {**table, "gradients": gradients})


def read(path: str | Path) -> tuple[dict[str, Any], list[Row]]:
    """The fields and the gradients of a file, each of the right type."""
    where = str(path)
    table = tables.check_fields(where, "profile", tables.read(path), _FIELDS, ("forward_s", "backward_s", "gradients"))
    for name in _NUMBERS:
        tables.check_kind(where, table, name, (int, float), "a number")
    for name in ("name", "source"):
        tables.check_kind(where, table, name, str, "a word in quotes")
    tables.check_kind(where, table, "gradients", list, "a list of tables, each under [[gradients]]")
    rows = [_row(f"{where}: gradient {index}", item) for index, item in enumerate(table["gradients"])]
    return {name: value for name, value in table.items() if name != "gradients"}, rows


def _row(where: str, item: object) -> Row:
    table = tables.check_fields(where, "gradient", item, _ROW_FIELDS, _ROW_FIELDS)
    tables.check_kind(where, table, "name", str, "a word in quotes")
    tables.check_kind(where, table, "ready_s", (int, float), _SECONDS)
    if not 0 <= table["ready_s"] < math.inf:
        raise ValueError(f"{where}: ready_s must be {_SECONDS}, got {table['ready_s']!r}")
    shape, dtype = table["shape"], table["dtype"]
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"{where}: shape must be a list of whole numbers, 0 or more, got {shape!r}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{where}: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return table["name"], tuple(shape), _DTYPES[dtype], table["ready_s"]
