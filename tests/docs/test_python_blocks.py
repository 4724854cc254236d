"""Every Python block of every page runs: on one rank, and where a page speaks of several, on two."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import PAGES, as_python, blocks
from doc_running import in_fresh_process, run_page

from gradsync.trace.reader import read_run

WITH_PYTHON = [page for page in PAGES if blocks(page, "python", "diff")]
FRAMEWORKS = re.compile(r"^(?:import|from) (lightning|accelerate|transformers|ray)\b", re.MULTILINE)


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(page: str, warm: ForkServerContext, tmp_path: Path) -> None:
    for framework in FRAMEWORKS.findall("".join(as_python(block) for block in blocks(page, "python", "diff"))):
        if find_spec(framework) is None:
            pytest.skip(f"{page} needs {framework}, which is not installed")
    said = in_fresh_process(warm, page, tmp_path)
    assert not said, said


def kept(names: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in names["sync"].state_dict().items()}


def check_checkpoints(folder: str) -> None:
    states = run_page("docs/checkpoint.md", folder, kept)
    assert any("residual" in key for key in states[0])
    for number, state in enumerate(states):
        assert state.keys() == states[0].keys()
        for key, tensor in states[0].items():
            assert torch.equal(state[key].nan_to_num(), tensor.nan_to_num()), f"{key} differs after block {number}"


def test_no_block_on_checkpoints_loses_anything_on_two_ranks(run: Callable[..., Any], tmp_path: Path) -> None:
    run(check_checkpoints, str(tmp_path))


def run_pages(pages: list[str], folder: str) -> None:
    for page in pages:
        (own := Path(folder, Path(page).stem)).mkdir(exist_ok=True)
        run_page(page, str(own))
        torch.distributed.barrier()


def test_pages_on_training_run_on_two_ranks_too(run: Callable[..., Any], tmp_path: Path) -> None:
    pages = ("index", "quick-start", "compression", "auto", "ddp", "health", "trace", "exporters")
    run(run_pages, [f"docs/{page}.md" for page in pages], str(tmp_path), timeout=100)
    assert [len(read_run(tmp_path / "trace" / name).ranks[1].steps) for name in ("run", "run-ddp")] == [6, 6]
    made = {path.name for path in (tmp_path / "exporters").iterdir()}
    assert made >= {"board", "board-live", "gradsync.prom", "run", "trace.json"}
