"""Beside the CPU: tensors of a GPU go to the backend that the string names for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from sides import begin_again

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def beside_nccl(folder: Path) -> None:
    for number, backend in enumerate(("cpu:gradsync,cuda:nccl", "cuda:nccl,cpu:gradsync")):
        (folder / str(number)).mkdir()
        begin_again(folder / str(number), backend)
        whole = torch.zeros(3, device="cuda")
        assert torch.clone(functional.all_gather_tensor(whole, 0, dist.group.WORLD)).tolist() == [0, 0, 0]
        for device in ("cpu", "cuda"):
            tensor = torch.ones(3, device=device)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            assert tensor.tolist() == [1, 1, 1]
        dist.barrier()
        assert dist.group.WORLD._get_backend(torch.device("cuda")).name() == "nccl"


def test_nccl_serves_gpus_wherever_it_stands_in_the_string(run: Run, tmp_path: Path) -> None:
    run(beside_nccl, tmp_path, ranks=1)


def on_gloo(folder: Path, backend: str) -> None:
    begin_again(folder, backend)
    for device in ("cpu", "cuda"):
        tensor = torch.ones(1000, device=device)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 1)
        assert tensor.eq(2).all()


@pytest.mark.parametrize("backend", ["gradsync", "cpu:gradsync,cuda:gloo"])
def test_gloo_serves_gpus_that_ranks_share(backend: str, run: Run, tmp_path: Path) -> None:
    run(on_gloo, tmp_path, backend)
