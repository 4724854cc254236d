"""A folder in which the commands of the pages find what they name, made once by a real run of two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doc_training import trained

from gradsync.launch.spawn import RankPool

_RUNS = ("run_dir", "runs/7", "before", "after")  # beside `run`, as pages call theirs
_CLUSTERS = ("cluster.toml", "box.toml")


@pytest.fixture(scope="session")
def workplace(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workplace")
    pool.run(trained, str(folder / "run"), ranks=2)
    for name in _RUNS:
        shutil.copytree(folder / "run", folder / name)
    for name in _CLUSTERS:
        shutil.copy(folder / "run" / "cluster.toml", folder / name)
    shutil.copy(folder / "run" / "profile.toml", folder / "profile.toml")
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], Any]:
    """What was printed since the last call, in one line."""
    return lambda: " ".join(capsys.readouterr().out.split())
