"""The GPUs that this process sees, and how they hang together."""

from __future__ import annotations

import re
import shutil
import subprocess

import torch

from gradsync.cli.doctor.rank_facts import Gpu

_PATIENCE_S = 10.0
_MOST_LETTERS = 16000
_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV[0-9]+")


def gpus() -> list[Gpu]:
    """The GPUs that torch sees; an empty list without any, or where the driver is broken."""
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [_gpu(index, count) for index in range(count)]
    except (RuntimeError, AssertionError):
        return []


def topology() -> str:
    """Return what `nvidia-smi topo -m` prints; "" without it."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "topo", "-m"], capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout[:_MOST_LETTERS] if done.returncode == 0 else ""


def matrix(text: str) -> dict[tuple[str, str], str]:
    """Return how each pair of GPUs and network cards is joined; what does not look like that table is left out.

    >>> matrix("\\tGPU0\\tGPU1\\tNIC0\\tCPU Affinity\\nGPU0\\t X \\tNV12\\tSYS\\t0-15\\nGPU1\\tNV12\\t X \\tPIX\\t0-15")
    {('GPU0', 'GPU1'): 'NV12', ('GPU0', 'NIC0'): 'SYS', ('GPU1', 'NIC0'): 'PIX'}
    """
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows]
    head = next((row for row in rows if "GPU0" in row[1:]), [])
    pairs: dict[tuple[str, str], str] = {}
    for row in rows:
        for name, cell in zip(head[1:], row[1:], strict=False):
            new = row[0] in head and row[0] != name and (name, row[0]) not in pairs
            if new and re.fullmatch(r"(GPU|NIC)[0-9]+", name) and _CELL.fullmatch(cell):
                pairs[row[0], name] = cell
    return pairs


def _gpu(index: int, count: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    peers = [other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]
    return Gpu(found.name, str(found.uuid), int(found.total_memory), peers)
