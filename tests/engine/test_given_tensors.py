"""Tensors that a forward is given are seen in two containers within each other, and no deeper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradsync.engine.hooks import _given


@dataclass
class Box:
    content: Any


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"x": x}, Box], ids=["list", "tuple", "dict", "dataclass"]
)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_tensors_are_seen_two_containers_deep(wrap: Callable[[Any], Any], depth: int) -> None:
    tensor = torch.zeros(1)
    wrapped: Any = tensor
    for _ in range(depth):
        wrapped = wrap(wrapped)
    assert [found is tensor for found in _given([wrapped])] == ([True] if depth <= 2 else [])
