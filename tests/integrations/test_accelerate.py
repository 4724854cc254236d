"""Accelerate with gradsync in the place of its DDP: the same weights, state in its checkpoints, named failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from gradsync.launch.spawn import RankPool

pytest.importorskip("accelerate")
pytestmark = pytest.mark.timeout(300)  # two launches of a large framework, on a machine that others may use too
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_train.py"


def in_ranks(folder: Path) -> dict[str, Any]:
    # Here, not above: pytest's own process does without the frameworks.
    from accelerate_training import laws

    return laws(folder)


@pytest.fixture(scope="module")
def found(warm: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found in one launch of two; rank 1 was killed in the end."""
    with RankPool(2, threads=1, context=warm) as ranks:
        survivor, killed = ranks.outcomes(in_ranks, tmp_path_factory.mktemp("accelerate"), timeout=240)
    assert survivor.ok, f"{survivor.text}\n--- rank 1 ---\n{killed.text}"
    assert "SIGKILL" in killed.text, killed.text
    value: dict[str, Any] = survivor.value
    return value


def test_nothing_of_the_process_is_otherwise_than_after_accelerates_own_ddp(found: dict[str, Any]) -> None:
    assert found["traces"] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_equal_those_of_accelerates_ddp_with_accumulation_and_clipping(
    found: dict[str, Any], precision: str
) -> None:
    assert found[precision] == []


def test_several_models_and_optimizers_equal_ddp(found: dict[str, Any]) -> None:
    assert found["two models"] == []


def test_with_compression_the_loss_goes_down_and_replicas_stay_equal(found: dict[str, Any]) -> None:
    losses = found["compressed"]["losses"]
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])
    assert found["compressed"]["replicas"] == []


def test_save_state_and_load_state_continue_to_the_bit(found: dict[str, Any]) -> None:
    compressed = found["compressed"]
    assert compressed["files"] == ["gradsync-rank0.safetensors", "gradsync-rank1.safetensors"]
    assert compressed["residuals of ranks"] != []  # without that, resuming would prove nothing
    assert compressed["residuals"] == []
    assert compressed["resumed"] == []


def test_a_checkpoint_of_stock_ddp_is_continued_with_a_warning(found: dict[str, Any]) -> None:
    assert any("saved without gradsync" in text for text in found["from stock"])


def test_replicas_that_differ_are_not_saved(found: dict[str, Any]) -> None:
    assert "call sync.drain() on every rank" in found["local_sgd"]["refused"]


def test_the_model_is_not_wrapped_and_its_copies_are_not_attached(found: dict[str, Any]) -> None:
    shape = found["shape"]
    assert shape["same object"]
    assert shape["names"]
    assert shape["no_sync"] == (1, 0)
    assert "is not attached" in shape["teacher"]


def test_what_would_synchronize_or_divide_twice_is_refused(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "averaged twice" in refused["wrapped"]
    assert "is attached to gradsync" in refused["attached"]
    assert "gradient_accumulation_steps=4 would accumulate twice" in refused["twice"]
    assert "say it in the plan" in refused["hook"]
    assert refused["guard"] == "guard must be a gs.Guard, got 5"


def test_a_killed_rank_is_named(found: dict[str, Any]) -> None:
    assert found["killed"].startswith("(1,) [rank 0/2 step 2")
    assert "died in step 2" in found["killed"]


def test_the_example_runs_under_torchrun_and_learns() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLE), "--steps", "20"], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    losses = re.search(r"loss ([\d.]+) at first, ([\d.]+) after 20 steps", done.stdout)
    assert losses is not None, done.stdout
    assert float(losses[2]) < 0.8 * float(losses[1])
    assert "20 synchronizations" in done.stdout
