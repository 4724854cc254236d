"""Modules that torch.jit has compiled: their tables are views of C++ and lack what a dict has."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch


class ScriptedTable(MutableMapping[str, Any]):
    """A table of such a module as a mapping. A tensor in it stays the same object as long as somebody holds it."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, key: str) -> Any:
        return self._table[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._table[key] = value

    def __delitem__(self, key: str) -> None:
        del self._table[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.keys())

    def __len__(self) -> int:
        return len(self._table)


def parameters_of(module: torch.nn.Module) -> MutableMapping[str, Any]:
    return _as_mapping(module._parameters)


def buffers_of(module: torch.nn.Module) -> MutableMapping[str, Any]:
    return _as_mapping(module._buffers)


def children_of(module: torch.nn.Module) -> MutableMapping[str, Any]:
    return _as_mapping(module._modules)


def refuse_scripted_root(model: torch.nn.Module) -> None:
    """Raise where torch.jit has compiled the whole model: hooks on its forward are not to be had."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "the model is compiled by torch.jit, which allows no hooks on its forward; attach a module that calls it: "
            "wrapped = torch.nn.Sequential(model), then gs.attach(wrapped, optimizer), and train wrapped"
        )


def _as_mapping(table: Any) -> MutableMapping[str, Any]:
    return table if isinstance(table, dict) else ScriptedTable(table)
