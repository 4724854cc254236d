"""Whether every rank of a group is about to observe: asked by the store alone, since who is not there answers nothing.

    rank 0    here-0 ── looks … looks ── its patience: absent := "1", if nothing stands there ──▶ reads it: "1"
    rank 1    (does not observe: another job script, or no gradsync)
    rank 2              here-2 ── looks … sees that it stands there ───────────────────▶ reads it: "1"

It is written once, by whoever is first to see all ranks or to lose patience, so all that came read the same. Who comes
when it stands there already belongs to the next round.
"""

from __future__ import annotations

import hashlib
import time

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gradsync.transport.awake_clock import Awake

_POLL_S = 0.01
_HERE, _ABSENT, _NOBODY = "here", "absent", "nobody"


def absent(parent: dist.ProcessGroup, what: str, patience_s: float) -> list[int]:
    """The ranks of `parent` that did not come to observe `what`: the same on all that did.

    Each look is a short question: a wait inside the store would hold other threads that ask it something.
    """
    ranks, me = dist.get_process_group_ranks(parent), dist.get_rank()
    missing = [rank for rank in ranks if rank != me]
    if not missing:
        return []
    store = _open_round(ranks, me, what)
    store.set(f"{_HERE}-{me}", "1")
    bound = Awake(patience_s)
    while missing := [rank for rank in missing if not store.check([f"{_HERE}-{rank}"])]:
        if bound.over() or store.check([_ABSENT]):
            break
        time.sleep(_POLL_S)
    found = store.compare_set(_ABSENT, "", " ".join(map(str, missing)) or _NOBODY).decode()
    return [] if found == _NOBODY else [int(rank) for rank in found.split()]


def _open_round(ranks: list[int], me: int, what: str) -> Store:
    """The part of the store for the first round on which nothing is written yet."""
    home = f"gradsync/observe/{hashlib.sha256(repr((ranks, what)).encode()).hexdigest()[:16]}"
    store = dist.distributed_c10d._get_default_store()
    while True:
        part = PrefixStore(f"{home}/{store.add(f'{home}/round-of-{me}', 1)}", store)
        if not part.check([_ABSENT]):
            return part
