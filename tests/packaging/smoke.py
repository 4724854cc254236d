"""What a wheel must do in an environment that has nothing but it and what it asks for; `make package` runs this there.

It is run from a folder without the sources, so that what is imported is what was installed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import distribution

import torch

import gradsync as gs
from gradsync.kernels.library import load

_HEAVY = ("lightning", "accelerate", "transformers", "ray", "starlette", "tensorboard", "mkdocs", "pytest")


def train() -> list[float]:
    """Two ranks, a model each, one plan that needs the C library to be quick."""
    gs.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(algorithm=gs.shared_memory(), compress=gs.int8()))
    for step in range(4):
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    return model.weight.detach().flatten().tolist()


def main() -> None:
    installed = distribution("gradsync")
    place = str(gs.__file__)
    assert "site-packages" in place, f"the sources in {place} were imported, not the wheel"
    assert load() is not None, "the wheel has no C library"
    heavy = [name for name in _HEAVY if importlib.util.find_spec(name) is not None]
    assert not heavy, f"the base install brings {heavy}"
    first, second = gs.spawn(train, 2)
    assert first == second, "the replicas differ"
    spoken = subprocess.run([f"{sys.prefix}/bin/gradsync", "--version"], capture_output=True, text=True, check=True)
    assert installed.version in spoken.stdout, f"gradsync --version says {spoken.stdout!r}"
    subprocess.run([f"{sys.prefix}/bin/gradsync", "plan", "--gpus", "8", "--params", "1e8", "--json"],
                   capture_output=True, check=True)  # fmt: skip
    print(f"gradsync {installed.version} works: two ranks trained the same weights in shared memory")


if __name__ == "__main__":
    main()
