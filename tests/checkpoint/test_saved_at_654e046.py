"""States that gradsync saved at 654e046, before every module moved, load today, and the runs go on to the bit.

That commit wrote the files, with `saved_runs.py`; what it reached from them stands beside each state as `after.*`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from saved_runs import RUNS, resumed

Run = Callable[..., list[Any]]
FOLDER = Path(__file__).parent / "saved_at_654e046"

# One tensor of each state that no fresh run has, by a part of its key.
KEPT = {
    "accumulate": ".hidden.wide",
    "int8": ".residual.wide",
    "int8-of-4-ranks": ".residual.wide",
    "topk": ".residual.wide",
    "powersgd": ".factor.wide",
    "by_parameter": ".residual.tall",
    "local_sgd": ".local_sgd.clock",
    "diloco": ".momentum.wide",
    "diloco-int8": ".residual.wide",
    "delayed": ".average1.of.wide",
    "delayed-int8": ".residual.wide",
    "gossip": ".gossip.",
    "async_sgd": ".async_sgd.",
    "auto": ".auto",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_an_old_state_as_it_did_then(run: Run, name: str) -> None:
    assert run(_differing, name, ranks=RUNS[name][2]) == [[], []]


@pytest.mark.parametrize("name", KEPT)
def test_an_old_state_holds_more_than_a_fresh_run_has(name: str) -> None:
    kept = {key: tensor for key, tensor in load_file(_file(name, 0)).items() if KEPT[name] in key}
    assert any(tensor.any() for tensor in kept.values()), f"nothing of {KEPT[name]}"


def _differing(name: str) -> list[str]:
    """The parameters that are not what 654e046 made of them."""
    weights, file = resumed(name, str(FOLDER)), load_file(_file(name, dist.get_rank()))
    return [key for key, tensor in weights.items() if not torch.equal(tensor, file[key])]


def _file(name: str, rank: int) -> Path:
    return FOLDER / f"{name}-rank{rank}.safetensors"
