"""Nothing of ours touches what belongs to the whole process: random states, threads, modes, signals, environment.

A model with dropout trains the same bits whatever watches, probes and profiles beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from global_calls import CALLS, HANDLE, MORE_CALLS, every_call, every_method, spawned
from global_state import READERS, snapshot, unchanged, unusual

Run = Callable[..., list[Any]]
NAMES = [*CALLS, *MORE_CALLS]
pytestmark = pytest.mark.timeout(240)


def test_every_public_name_has_a_call() -> None:
    assert set(CALLS) == set(gs.__all__)
    assert set(HANDLE) == {name for name in dir(gs.GradSync) if not name.startswith("_")}


@pytest.mark.parametrize("part", range(4))
def test_no_public_call_changes_what_is_the_process_s(part: int, run: Run, tmp_path: Path) -> None:
    run(every_call, NAMES[part::4], tmp_path, timeout=200)


def test_no_method_of_the_handle_does(run: Run, tmp_path: Path) -> None:
    run(every_method, tmp_path, timeout=200)


def test_spawn_does_not() -> None:
    # Python itself settles how processes start by default when the first one starts, in whatever way.
    with unusual(), unchanged("spawn", but={"how processes start"}):
        assert gs.spawn(spawned, 2, timeout=120) == [2, 2]


IN_A_FRESH_PROCESS = """
import numpy, torch, torch.distributed, torch.multiprocessing
from global_state import snapshot, unchanged, unusual
with unusual():
    with unchanged("import"):
        import gradsync as gs
    before = snapshot()["environment"]
    with unchanged("init", but={"environment", "hooks"}):  # torch's process group has an excepthook of its own
        gs.init()
    after = snapshot()["environment"]
    print(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
"""


def test_import_and_init_only_name_gloos_interface() -> None:
    env = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent / "support"), *filter(None, [env.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("['GLOO_SOCKET_IFNAME']", "[]")  # [] where there is no loopback


@pytest.mark.parametrize("what", ["torch's random state", "number of threads", "grad mode", "warnings", "environment"])
def test_the_comparison_can_fail(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meddle = {
        "torch's random state": lambda: torch.rand(1),
        "number of threads": lambda: torch.set_num_threads(5),
        "grad mode": lambda: torch.set_grad_enabled(False),
        "warnings": lambda: __import__("warnings").simplefilter("always"),
        "environment": lambda: monkeypatch.setenv("GRADSYNC_MEDDLED", "1"),
    }
    assert set(meddle) <= set(READERS)
    grad = torch.is_grad_enabled()
    try:
        with unusual(), pytest.raises(AssertionError, match=f"meddling changed {what}"), unchanged("meddling"):
            meddle[what]()
    finally:
        torch.set_grad_enabled(grad)


# --- dropout: the bits of a training that draws from the global random state ---


def with_dropout(sort: str, trace: str | None = None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Weights after ten steps, and the random states: seeded before the model is built, as everybody does."""
    torch.manual_seed(40 + dist.get_rank())
    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 3))
    forward, sync = model, None
    plans: dict[str, Any] = {"auto": gs.auto(allow="exact", steps=3), "default": gs.Plan(), "guarded": gs.Plan()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if sort == "ddp":
        forward = DistributedDataParallel(model)
    else:
        guard = gs.Guard(drift="raise", nonfinite="skip") if sort == "guarded" else None
        sync = gs.attach(model, optimizer, plans[sort], guard=guard, trace=trace)
    for _ in range(10):
        forward(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sync is not None:
        sync.detach()
    states = {what: state for what, state in snapshot().items() if "random" in what}
    return [param.detach().clone() for param in model.parameters()], states


def check_dropout(folder: Path) -> None:
    weights, states = with_dropout("ddp")
    for sort in ("default", "auto", "guarded"):
        others, after = with_dropout(sort, trace=str(folder / sort))
        assert after == states, sort
        assert all(torch.equal(a, b) for a, b in zip(others, weights, strict=True)), sort


def test_with_dropout_every_exact_plan_trains_the_bits_of_ddp(run: Run, tmp_path: Path) -> None:
    run(check_dropout, tmp_path, timeout=200)
