"""Runs the Python of a page: all blocks in order, in one namespace, in an empty folder, with warnings as errors."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from doc_pages import as_python, blocks

import gradsync as gs
from gradsync.integrations.ddp_state import DDPState

# The README shows everything one can write, so its names are given. Other pages make what they use.
GIVEN = {
    "README.md": """
import os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import gradsync as gs

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.head.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1) * self.head.scale

loss_fn, fn, num_tokens = nn.functional.mse_loss, os.getpid, 4
loader = [(torch.randn(4, 8), torch.randn(4)) for _ in range(3)]

def given():
    global model, optimizer, ddp, group, loss, tensor, state
    gs.init()
    model, group, tensor = Net(), torch.distributed.group.WORLD, torch.ones(3)
    ddp, loss = DistributedDataParallel(Net()), model(loader[0][0]).sum()
    optimizer = torch.optim.AdamW(model.parameters())
    state = gs.attach(Net()).state_dict()
    gs.Plan().save("plan.toml")
    gs.Cluster(((0,), (1,)), gs.Link(1e-5, 1e9), gs.Link(1e-5, 1e9)).save("cluster.toml")

def step():
    loss_fn(model(loader[0][0]), loader[0][1]).backward()

given()
""",
}


def run_page(page: str, folder: str, state: Callable[[dict[str, Any]], Any] | None = None) -> list[Any]:
    """Run it here; `state(names)` after each block, if one is asked for."""
    names: dict[str, Any] = {"__name__": "__main__"}
    seen = []
    with _as_a_script(folder):
        exec(compile(GIVEN.get(page, ""), f"what is given on {page}", "exec"), names)
        for block in blocks(page, "python", "diff"):
            if page in GIVEN:
                _leave(names)  # each block is a script of its own
            exec(compile(as_python(block), page, "exec"), names)
            seen.append(state(names) if state is not None else None)
        _leave(names)
    return seen


def _leave(names: dict[str, Any]) -> None:
    """What the end of a script would do: a pool's process lives on, and groups and threads with it."""
    for value in names.values():
        if isinstance(value, gs.GradSync):
            value.detach()
        elif isinstance(value, DDPState):
            value.close()


@contextmanager
def _as_a_script(folder: str) -> Iterator[None]:
    """An empty working folder, nothing printed, seeds set; a group that the page makes is ended."""
    had_group = dist.is_initialized()
    with ExitStack() as stack:
        stack.enter_context(chdir(folder))
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(redirect_stderr(StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        # What Lightning says of torch, and of loaders without workers, is not for these pages to mend.
        warnings.filterwarnings("ignore", module=r"lightning\.")
        torch.manual_seed(dist.get_rank() if had_group else 0)
        yield
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()


def in_fresh_process(context: ForkServerContext, page: str, folder: Path, timeout: float = 100) -> str:
    """Run a page as `python page.py` would: no launcher, one rank. What went wrong, or nothing."""
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(page, str(folder), there))
    process.start()
    there.close()
    try:
        said = here.recv_bytes().decode() if here.poll(timeout) else f"{page} did not end in {timeout:g} s"
        process.join(10)
    except EOFError:
        said = f"{page}: its process died without a word"
    finally:
        process.kill()
        process.join()
        here.close()
    return said


# A script's names live as long as it does. Here the last to hold them could be a callback in a thread of gloo's, which
# would then end the group, and so join itself: std::terminate, seen once.
_kept: list[dict[str, Any]] = []


def _report(page: str, folder: str, there: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    said = ""
    try:
        run_page(page, folder, _kept.append)
    except BaseException:
        said = traceback.format_exc()
    there.send_bytes(said.encode())
    there.close()
