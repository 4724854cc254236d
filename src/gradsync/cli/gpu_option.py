"""The option --share-gpus: the ranks of a command on GPUs over NCCL, several on one where there are more ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from gradsync.cli.shared import BadInput, Parser
from gradsync.errors import LaunchError
from gradsync.launch.shared_gpus import NOTE, Mps, check_nccl_ranks


def add_share_gpus(parser: Parser) -> None:
    """Give a command the option."""
    parser.add_argument(
        "--share-gpus", action="store_true", help="on GPUs over NCCL, several ranks on one where there are more ranks"
    )


def check_share_gpus(command: str, asked: bool, ranks: int) -> None:
    """Say, before any rank is started, that there is no GPU for them."""
    if not asked:
        return
    if not torch.cuda.is_available():
        raise BadInput(f"gradsync {command}: --share-gpus needs a GPU, and torch sees none here: leave it out")
    try:
        check_nccl_ranks(ranks)
    except LaunchError as error:
        raise BadInput(f"gradsync {command}: --share-gpus cannot be: {error}") from None


@contextmanager
def shared_gpus(ranks: int, quiet: bool, mps: bool = True) -> Iterator[dict[str, str]]:
    """Yield what so many ranks on the GPUs of this machine need in their environment: MPS, where it can be had.

    Without it they take turns; so they have to, by `mps=False`, if one of them is to be killed.
    """
    if ranks <= torch.cuda.device_count():
        yield {}
        return
    told = [f"gradsync: {NOTE}"]
    with ExitStack() as stack:
        env = {}
        if mps and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:  # else the ranks are clients of the user's own
            try:
                env = stack.enter_context(Mps()).environment
            except LaunchError as error:
                told.append(f"gradsync: without MPS, so every collective takes some milliseconds: {error}")
        if not quiet:
            print(*told, sep="\n", file=sys.stderr, flush=True)
        yield env
