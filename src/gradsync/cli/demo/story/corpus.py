"""The demo's text: the Python standard library's own source, which every reader already has."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

from gradsync.errors import GradSyncError

VOCABULARY = 128  # ASCII; other characters become "?"

_TRAIN_CHARACTERS = 1_500_000
_VALIDATION_CHARACTERS = 150_000
_HELD_OUT = 10  # every tenth file is for validation only


class Text(NamedTuple):
    """Characters as ASCII codes."""

    train: torch.Tensor
    validation: torch.Tensor


def read_library(folder: Path | None = None) -> Text:
    """The modules of the standard library in alphabetical order, every tenth file held out.

    The same on every rank of a machine, since nothing in it is random.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    files = sorted(folder.glob("*.py"))
    held_out = files[_HELD_OUT - 1 :: _HELD_OUT]
    train = _read([file for file in files if file not in held_out], _TRAIN_CHARACTERS)
    validation = _read(held_out, _VALIDATION_CHARACTERS)
    if min(len(train), len(validation)) < 10_000:
        raise GradSyncError(
            f"{folder} holds too little Python source to train on ({len(files)} files); "
            "install the standard library's source files"
        )
    return Text(train, validation)


def draw(text: torch.Tensor, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows at random places, and the same shifted by one: what is read, and what is to be guessed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _read(files: list[Path], limit: int) -> torch.Tensor:
    characters = bytearray()
    for file in files:
        if len(characters) < limit:
            characters += file.read_text("utf-8", "replace").encode("ascii", "replace")
    return torch.frombuffer(characters[:limit], dtype=torch.uint8) if characters else torch.empty(0, dtype=torch.uint8)
