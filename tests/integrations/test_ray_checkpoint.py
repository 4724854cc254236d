"""What the Ray adapter writes and reads, and what it refuses; without Ray's processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs

pytest.importorskip("ray.train", reason="Ray Train is not installed: pip install 'gradsync[ray]'")

from gradsync.integrations.ray import read, stats, write


@pytest.fixture
def sync() -> Iterator[gs.GradSync]:
    gs.init()
    model = nn.Linear(3, 2)
    made = gs.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    yield made
    made.detach()
    dist.destroy_process_group()


def test_a_state_comes_back_as_it_was(sync: gs.GradSync, tmp_path: Path) -> None:
    state = {"step": 7, "model": {"weight": torch.arange(3.0)}, "names": ["a", "b"]}
    write(tmp_path, sync, state, rank=0)
    back = read(tmp_path, rank=0, world_size=1)
    assert (back["step"], back["names"]) == (7, ["a", "b"])
    assert torch.equal(back["model"]["weight"], torch.arange(3.0))
    assert back["sync"].keys() == sync.state_dict().keys()
    sync.load_state_dict(back["sync"])


def test_what_is_equal_on_all_workers_is_written_once(sync: gs.GradSync, tmp_path: Path) -> None:
    write(tmp_path, sync, {"step": 7}, rank=3)
    assert [file.name for file in tmp_path.iterdir()] == ["gradsync-rank3.safetensors"]


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"sync": 1}, 'state has a "sync" of its own'),
        ({"lr": Fraction(1, 3)}, r"torch\.load\(weights_only=True\) would not read after a restart"),
    ],
)
def test_a_state_that_could_not_be_resumed_is_refused_when_it_is_reported(
    state: dict[str, Any], sentence: str, sync: gs.GradSync, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        write(tmp_path, sync, state, rank=0)


def test_weights_that_differ_by_worker_are_refused(sync: gs.GradSync, tmp_path: Path) -> None:
    with (
        mock.patch.object(gs.GradSync, "replicas_equal", False),
        pytest.raises(gs.GradSyncError, match=r"differ between two averages of .*sync\.drain\(\)"),
    ):
        write(tmp_path, sync, {"step": 7}, rank=0)


def test_a_checkpoint_of_somebody_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(ValueError, match=rf"the checkpoint in {tmp_path} has no state\.pt"):
        read(tmp_path, rank=0, world_size=1)


def test_stats_have_a_name_of_their_own(sync: gs.GradSync) -> None:
    assert stats(sync).keys() == {f"gradsync/{key}" for key in sync.stats()}


def test_without_ray_the_extra_is_named_and_gradsync_never_imports_it() -> None:
    code = "import sys, gradsync; assert 'ray' not in sys.modules; sys.modules['ray'] = None; "
    code += "import gradsync.integrations.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "AssertionError" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("install it with `pip install 'gradsync[ray]'`")
