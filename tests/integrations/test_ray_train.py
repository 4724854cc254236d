"""Ray Train, for real: local Ray, two workers, one of them killed."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("ray.train", reason="Ray Train is not installed: pip install 'gradsync[ray]'")

from gradsync.integrations.ray import read

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
LIMIT_S = 500  # for a busy machine; most of the time goes into imports in Ray's processes

pytestmark = pytest.mark.timeout(LIMIT_S + 60)

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    # Ray looks into its workers this often, and starts them within this: on a busy machine they take long.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(LIMIT_S),
    "RAY_worker_register_timeout_seconds": str(LIMIT_S),
}


class Seen(NamedTuple):
    """What there is after the run: its folder, what the driver noted and printed, what is new in /dev/shm."""

    folder: Path
    noted: dict[str, Any]
    output: str
    shared_memory: set[str]


def shared_memory() -> set[str]:
    """Without semaphores of multiprocessing, which a compiler beside us has while it runs."""
    return {entry for entry in os.listdir("/dev/shm") if not entry.startswith("sem.mp-")}


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """One Ray for all tests. Its sockets need a shorter path than pytest's."""
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="gs-ray-") as name:
        env = os.environ | QUIET | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(EXAMPLES)}
        env |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "HOME": name, "TMPDIR": name}
        driver = [sys.executable, str(HERE / "ray_driver.py"), name]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(driver, env=env, cwd=name, timeout=LIMIT_S, check=False, **streams)
        assert done.returncode == 0, done.stdout
        noted = json.loads((Path(name) / "seen.json").read_text())
        yield Seen(Path(name), noted, done.stdout, shared_memory() - before)


def test_weights_equal_those_of_prepare_model(seen: Seen) -> None:
    for rank in range(2):
        law = json.loads((seen.folder / f"laws-{rank}.json").read_text())
        assert law["equal"]
        first, last = law["compressed"]
        assert last < 0.5 * first
        assert "the model is under DistributedDataParallel, which averages gradients itself" in law["twice"]


def test_a_killed_worker_is_named_and_the_run_resumes_to_the_bit(seen: Seen) -> None:
    assert (seen.folder / "died").exists()
    assert (seen.folder / "lost-0.txt").read_text().startswith("(1,): [rank 0/2 step 14")
    assert not (seen.folder / "lost-1.txt").exists()
    assert "gradsync.errors.PeerLost: [rank 0/2 step 14" in seen.output  # as Ray itself tells it
    assert (seen.noted["metrics"]["step"], seen.noted["metrics"]["started_at"]) == (25, 10)
    resumed = read(Path(seen.noted["checkpoint"]), rank=0, world_size=2)
    for rank in range(2):
        weights = torch.load(seen.folder / f"undisturbed-{rank}.pt", weights_only=True)
        for name, weight in weights.items():
            assert torch.equal(weight, resumed["model"][name]), name


def test_reports_say_what_synchronization_costs(seen: Seen) -> None:
    assert seen.noted["metrics"]["gradsync/step_s"] > 0
    assert seen.noted["metrics"]["gradsync/exposed_s"] >= 0
    assert "of it waiting" in seen.output


def test_each_worker_finds_its_own_debts_also_when_their_number_changes(seen: Seen) -> None:
    """Without different residuals, resuming to the bit with compression would prove nothing."""
    folder = Path(seen.noted["checkpoint"])
    own = [read(folder, rank, world_size=2)["sync"] for rank in range(2)]
    debts = [own[rank][f"gradsync.rank{rank}.residual.2.weight"] for rank in range(2)]
    assert debts[0].any()
    assert debts[1].any()
    assert not torch.equal(debts[0], debts[1])
    assert read(folder, 0, world_size=1)["sync"].keys() == own[0].keys() | own[1].keys()
    assert [len(read(folder, rank, world_size=3)["sync"]) for rank in range(3)] == [len(own[0]), len(own[1]), 0]


def test_ray_and_its_killed_worker_leave_nothing(seen: Seen) -> None:
    assert seen.noted["left"] == []
    assert seen.shared_memory == set()
