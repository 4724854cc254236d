"""What a user sees of the package: its public names, and what was meant by a slip."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

import gradsync as gs


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    assert [name for name in dir(gs) if not name.startswith("_")] == sorted(gs.__all__)
    assert all(getattr(gs, name) is not None for name in gs.__all__)


def test_folders_behind_it_can_be_imported_all_the_same() -> None:
    assert importlib.import_module("gradsync.algorithms.ring").ring is gs.ring
    assert importlib.import_module("gradsync.plan.sync_plan").Plan is gs.Plan


def test_no_folder_bears_a_name_like_a_functions() -> None:
    assert not hasattr(gs, "allreduce")
    assert not {folder.name for folder in pkgutil.iter_modules(gs.__path__)} & set(gs.__all__)


SLIPS: list[tuple[Callable[[], Any], str]] = [
    (lambda: gs.Plan(compress="int8"), "got 'int8' (did you mean gs.int8()?)"),  # type: ignore[arg-type]
    (lambda: gs.Plan(pace=4), "got 4 (did you mean gs.accumulate(4)?)"),  # type: ignore[arg-type]
    (lambda: gs.Plan(pace="gossip"), "got 'gossip' (did you mean gs.gossip(...)?)"),  # type: ignore[arg-type]
    (lambda: gs.Plan(pace=gs.local_sgd), "(did you mean gs.local_sgd(...)?)"),  # type: ignore[arg-type]
    (lambda: gs.Plan(algorithm="ring"), "got 'ring' (did you mean gs.ring()?)"),  # type: ignore[arg-type]
    (lambda: gs.Plan(algorithm=gs.tree), "(did you mean gs.tree()?)"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("slip", "hint"), SLIPS, ids=[hint for _, hint in SLIPS])
def test_a_plan_says_what_was_meant(slip: Callable[[], Any], hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        slip()
    assert str(caught.value).endswith(hint)
