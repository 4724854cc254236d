"""The text: the Python standard library's own source, which every reader already has. Pure, but for reading it."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

from gradsync.cli.demo.story.corpus import draw
from gradsync.cli.demo.story.demo_model import DemoShape

Batch = tuple[torch.Tensor, torch.Tensor]

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_HELD_OUT = 10  # every tenth file is for validation only
_WINDOWS = 256  # of the held-out text, the same for all
_MAX_RANKS = 64


class Corpus(NamedTuple):
    """Characters as ASCII codes. Loss may be compared between runs with the same digest."""

    train: torch.Tensor
    held_out: torch.Tensor
    digest: str


@functools.cache
def read() -> Corpus:
    """All modules in alphabetical order of their paths, without tests; the same on every rank of a machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in folder.rglob("*.py") if not _NOT_LIBRARY.intersection(file.parts))
    held_out = files[_HELD_OUT - 1 :: _HELD_OUT]
    kept_out = set(held_out)
    train, rest = _ascii([file for file in files if file not in kept_out]), _ascii(held_out)
    digest = hashlib.blake2b(train + rest, digest_size=8).hexdigest()
    return Corpus(*(torch.frombuffer(text, dtype=torch.uint8) for text in (train, rest)), digest)


def batch(shape: DemoShape, seed: int, step: int, rank: int) -> Batch:
    """What a rank reads in a step: the same for every arm, another one for every seed, step and rank."""
    return draw(read().train, shape.batch, shape.context, (seed * 1_000_003 + step) * _MAX_RANKS + rank)


def held_out(shape: DemoShape, part: int = 0, parts: int = 1) -> Batch:
    """Windows all over the held-out text, those of one of so many parts."""
    text = read().held_out
    starts = torch.linspace(0, len(text) - shape.context - 1, _WINDOWS, dtype=torch.float64).long()[part::parts]
    windows = text[starts[:, None] + torch.arange(shape.context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _ascii(files: list[Path]) -> bytearray:
    """Other characters become "?"."""
    return bytearray(b"".join(file.read_text("utf-8", "replace").encode("ascii", "replace") for file in files))
