"""The recipe of docs/failures.md, done for real: a rank is killed, torchrun restarts all, the run resumes."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from gradsync.launch.spawn import RankPool

EXAMPLE = Path(__file__).parent.parent / "examples" / "resume.py"

# torchrun ends the survivor of a death at once, at times before it could say whom it lost: here it may finish.
LAST_WORDS = "import runpy, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); del sys.argv[0]; "
LAST_WORDS += "runpy.run_path(sys.argv[0], run_name='__main__')"


def torchrun(folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--no-python", sys.executable, "-c", LAST_WORDS]
    return [*command, str(EXAMPLE), *options(folder), *arguments]


def options(folder: Path) -> list[str]:
    return ["--folder", str(folder), "--steps", "25", "--compress"]


def train(folder: Path) -> None:
    with mock.patch.object(sys, "argv", [str(EXAMPLE), *options(folder)]):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.fixture(scope="module")
def undisturbed(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run in which nobody dies."""
    folder = tmp_path_factory.mktemp("undisturbed")
    pool.run(train, folder, ranks=2)
    return torch.load(folder / "final.pt", weights_only=True)


@pytest.mark.timeout(300)
def test_a_killed_run_resumes_to_the_bit(undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Rank 0, which has the store; tests/launch/test_two_hosts.py kills the other."""
    killed = subprocess.run(torchrun(tmp_path, "--die", "0", "14"), capture_output=True, text=True, timeout=250)
    assert killed.returncode == 0, killed.stderr
    assert "resumes at step 10" in killed.stdout
    assert "PeerLost: [rank 1/2 step 14" in killed.stderr
    assert "rank 0 (pid" in killed.stderr
    resumed = torch.load(tmp_path / "final.pt", weights_only=True)
    for name, weight in undisturbed.items():
        assert torch.equal(weight, resumed[name]), name
    assert_ranks_owe_different_things(tmp_path)


def assert_ranks_owe_different_things(folder: Path) -> None:
    """Without that, resuming with compression would prove nothing."""
    first, second = (torch.load(folder / f"rank{rank}-10.pt", weights_only=True)["sync"] for rank in (0, 1))
    mine, theirs = first["gradsync.rank0.residual.2.weight"], second["gradsync.rank1.residual.2.weight"]
    assert mine.any()
    assert theirs.any()
    assert not torch.equal(mine, theirs)
