"""For real: Lightning's own launcher and torchrun, the example, and a rank that is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_train.py"
DEATH = Path(__file__).parent / "lightning_death.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """To its end; what it prints."""
    variables = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTEST", "PL_"))}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=140, cwd=folder, env=variables)


def loss(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"val_loss ([\d.]+)", done.stdout)
    return float(found)


@pytest.mark.timeout(300)
def test_the_example_learns_and_resumes_under_both_launchers(tmp_path: Path) -> None:
    begun = start(tmp_path, sys.executable, EXAMPLE, "--compress", "--epochs", 1)
    resumed = start(tmp_path, *TORCHRUN, EXAMPLE, "--compress", "--epochs", 2, "--resume")
    assert loss(resumed) < loss(begun) < 1.3


@pytest.mark.timeout(300)
def test_a_killed_rank_is_named_and_the_rest_ends(tmp_path: Path) -> None:
    run = start(tmp_path, sys.executable, DEATH, 1)  # under torchrun it is as in tests/test_restart.py
    assert run.returncode != 0
    assert "PeerLost: [rank 0/2 step 4" in run.stderr, run.stderr
    assert "rank 1 (pid" in run.stderr
