"""Watching is invisible: whatever DistributedDataParallel is asked for, bits and errors are those without."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
import gradsync_autotrace
from integrations.observed_features import FEATURES, Told

Run = Callable[..., list[Any]]


@contextlib.contextmanager
def traced_by_environment(folder: str) -> Iterator[None]:
    """As with GRADSYNC_TRACE from the start."""
    make = DistributedDataParallel.__init__
    with patch.dict(os.environ, {"GRADSYNC_TRACE": folder}):
        gradsync_autotrace.install()
        try:
            yield
        finally:
            DistributedDataParallel.__init__ = make  # type: ignore[method-assign]


def run_arm(arm: str, feature: str, folder: str) -> tuple[Told, list[str]]:
    """What it came to, and what gradsync said."""
    observers = []

    def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, **({"bucket_cap_mb": 0.002} | options))
        if arm == "observe":
            guard = gs.Guard(nonfinite="skip")
            observers.append(gs.observe(ddp, trace=f"{folder}/{len(observers)}", guard=guard))
        return ddp

    environment = traced_by_environment(f"{folder}/all") if arm == "GRADSYNC_TRACE" else contextlib.nullcontext()
    with environment, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = FEATURES[feature](wrap)
        for observer in observers:
            observer.close()
    said = [str(each.message) for each in caught]
    return found, [text for text in said if "gradsync" in text or text.startswith("[rank") or "replica" in text]


def check_invisible(feature: str, folder: str) -> None:
    expected, _ = run_arm("plain", feature, folder)
    assert expected or feature == "own group"
    for arm in ("observe", "GRADSYNC_TRACE"):
        found, said = run_arm(arm, feature, f"{folder}/{arm}")
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            assert same, (arm, one, other)
        assert not said, said


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_watching_changes_nothing(run: Run, tmp_path: Any, feature: str, ranks: int) -> None:
    run(check_invisible, feature, str(tmp_path), ranks=ranks, timeout=120)
