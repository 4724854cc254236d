"""Every Python block of docs/checkpoint.md runs, one after the other, on two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs

PAGE = Path(__file__).parent.parent / "docs" / "checkpoint.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run_page(folder: str) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    sync = gs.attach(model, optimizer, gs.Plan(compress=gs.int8()))
    for step in range(3):
        model(torch.full((2, 8), float(step + dist.get_rank()))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = sync.state_dict()
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "sync": sync, "torch": torch, "dist": dist}
    names |= {"rank": dist.get_rank(), "folder": Path(folder)}
    for number, block in enumerate(blocks()):
        exec(compile(block, f"{PAGE}, block {number}", "exec"), names)
        after = sync.state_dict()
        assert after.keys() == before.keys()
        for key, tensor in before.items():
            assert torch.equal(after[key].nan_to_num(), tensor.nan_to_num()), f"{key} differs after block {number}"
    sync.detach()
    return len(blocks())


def test_the_blocks_of_the_page_run(run: Callable[..., Any], tmp_path: Path) -> None:
    assert min(run(run_page, str(tmp_path))) >= 7
