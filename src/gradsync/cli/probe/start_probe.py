"""How the ranks of a probe come to be: started here, or by a launcher; each then calls `measure`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from gradsync.cli.shared import advance, follow
from gradsync.launch.spawn import RankPool
from gradsync.probe.measure import STAGES, ProbeFindings, measure

_BOUND_S = 600.0


def probe_alone(ranks: int, brief: bool, quiet: bool) -> ProbeFindings:
    """Start the ranks on this machine, wait, and return what they found."""
    with _progress(quiet) as path, RankPool(ranks, threads=1) as pool:
        findings = pool.run(_take_part, brief, path, timeout=_BOUND_S)[0]
    assert isinstance(findings, ProbeFindings)
    return findings


def probe_as_rank(brief: bool, quiet: bool) -> ProbeFindings:
    """Take part in the default group, which exists."""
    if dist.get_rank() != 0:
        return _take_part(brief, "")
    with _progress(quiet) as path:
        return _take_part(brief, path)


def _take_part(brief: bool, path: str) -> ProbeFindings:
    """One rank; rank 0 notes in the file how far all are."""
    world = dist.group.WORLD
    assert world is not None
    return measure(world, brief, partial(_note, path) if dist.get_rank() == 0 else None)


def _note(path: str, stage: str) -> None:
    advance(path)


@contextmanager
def _progress(quiet: bool) -> Iterator[str]:
    """A file for it, gone afterwards; while it grows, progress is shown."""
    with tempfile.TemporaryDirectory(prefix="gradsync-probe-") as folder:
        path = os.path.join(folder, "progress")
        with follow(path, len(STAGES), "measuring", quiet):
            yield path
