"""Hugging Face's Trainer with gradsync in the place of its DDP."""

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
EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"


def in_ranks(folder: Path) -> dict[str, Any]:
    # Here, not above: pytest's own process does without the frameworks.
    from hf_training import laws

    return laws(folder)


@pytest.fixture(scope="module")
def found(warm: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found in one launch of two; rank 1 was killed in the end."""
    with RankPool(2, threads=1, context=warm) as ranks:
        survivor, killed = ranks.outcomes(in_ranks, tmp_path_factory.mktemp("trainer"), timeout=240)
    assert survivor.ok, f"{survivor.text}\n--- rank 1 ---\n{killed.text}"
    assert "SIGKILL" in killed.text, killed.text
    value: dict[str, Any] = survivor.value
    return value


@pytest.mark.parametrize("run", ["tokens", "no tokens", "auto"])
def test_weights_and_losses_equal_those_of_the_trainers_ddp(found: dict[str, Any], run: str) -> None:
    """With dropout, accumulation, a short last window, clipping, unequally many tokens; the second one in bf16."""
    assert found[run]["wrapped"] == ["DistributedDataParallel", "GPT2LMHeadModel"]
    stock, ours = found[run]["losses"]
    assert stock == ours
    assert found[run]["differing"] == []


def test_stats_are_in_the_trainers_logs(found: dict[str, Any]) -> None:
    assert {"gradsync/steps", "gradsync/exposed_s", "gradsync/nbytes"} <= set(found["tokens"]["logged"])


def test_with_compression_the_loss_goes_down_and_replicas_stay_equal(found: dict[str, Any]) -> None:
    losses = found["compressed"]["losses"]
    assert losses[-1] < 0.95 * losses[0]
    assert found["compressed"]["replicas"] == []


def test_resume_from_checkpoint_continues_to_the_bit(found: dict[str, Any]) -> None:
    compressed = found["compressed"]
    assert compressed["files"] == ["gradsync-rank0.safetensors", "gradsync-rank1.safetensors"]
    assert compressed["resumed"] == []
    assert compressed["resumed from"] == "checkpoint-16"


def test_evaluation_and_the_best_model_are_those_of_ddp(found: dict[str, Any]) -> None:
    stock, ours = found["best"]["metric"]
    assert stock == ours
    assert found["best"]["differing"] == []


def test_paces_come_together_before_a_checkpoint_and_at_the_end(found: dict[str, Any]) -> None:
    """Also if a callback that came after ours wants the evaluation and the checkpoint."""
    local = found["local_sgd"]
    assert local["differed"]
    assert (local["evaluated"], local["replicas"]) == ([], [])
    assert local["files"] == ["gradsync-rank0.safetensors", "gradsync-rank1.safetensors"]
    assert found["delayed"] == {"replicas": [], "waiting": 0}


def test_what_would_synchronize_or_divide_twice_is_refused(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "set gradient_accumulation_steps=4" in refused["window"]
    assert "attached already" in refused["twice"]
    assert "averaged twice" in refused["wrapped"]


def test_what_is_no_plan_and_no_guard_is_refused_at_once(found: dict[str, Any]) -> None:
    assert "plan must be a gs.Plan" in found["refused"]["plan"]
    assert "guard must be a gs.Guard, got 5" in found["refused"]["guard"]


def test_a_rank_that_dies_in_the_trainers_own_collective_is_named(found: dict[str, Any]) -> None:
    assert found["killed"].startswith("(1,) [rank 0/2 step 3")
    assert "a collective of the Trainer's own" in found["killed"]


def test_the_example_runs_under_accelerate_launch_and_learns(tmp_path: Path) -> None:
    # With --cpu it starts one process only: who has no GPU says so in the script, and --multi_gpu means torchrun.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLE), "--steps", "20", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    losses = re.search(r"loss ([\d.]+) at first, ([\d.]+) after 20 steps", done.stdout)
    assert losses is not None, done.stdout
    assert float(losses[2]) < 0.8 * float(losses[1])
    assert (tmp_path / "checkpoint-20" / "gradsync-rank1.safetensors").exists()
